import torch


def check(learner, t):
    m = 2
    for n in (t.integers(3, 60), 64, t.integers(300, 500)):
        for name, x in (
            ("randn", t.randn(m, n)),
            ("3 · arange + randn", 3 * torch.arange(n).float() + t.randn(m, n)),
            ("1000 - 3 · arange + randn", 1000 - 3 * torch.arange(n).float() + t.randn(m, n)),
        ):
            expected = torch.softmax(x.double(), 1).float()
            t.close(learner.online_softmax(x), expected, f"online_softmax(x), x = {name}, [{m}, {n}]", 1e-4)
            t.require(
                t.count("bytes_written") >= x.nbytes,
                "no kernel of yours wrote the result",
                "结果不是由你的核函数写出的",
            )
    t.at_most(t.count("bytes_read"), 8 * x.numel(), "bytes read", "读取的字节数")
    t.close(learner.online_softmax(x, 32), expected, "online_softmax(x, block=32)", 1e-4)


def fast(learner, t):
    m, n = 2048, 16_384
    args = [t.randn(m, n), 4096]
    what = f"online_softmax(x, block=4096), x [{m}, {n}]"
    t.timed(learner.online_softmax, args, lambda x, _: torch.softmax(x, 1), what, at_least=0.55, m=m, n=n)
