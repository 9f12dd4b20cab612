STEPS, LAYERS = 3, 1


def check(learner, t):
    seed = t.integers(0, 1000)
    plain, theirs, mine, calls, after_error = t.probe("runs", seed, STEPS, LAYERS)
    t.close(theirs, plain, "losses(settings)", 1e-6)
    t.require(
        calls == LAYERS * STEPS,
        f"your attention was called {calls} times in {STEPS} steps of {LAYERS} layers: it is not what the model trained with",
        f"{STEPS} 步、{LAYERS} 层中，你的注意力被调用了 {calls} 次：模型不是用它训练的",
    )
    t.close(mine, theirs, "losses(settings, sdpa)", 2e-3)
    t.require(
        after_error, "after an exception the library still has your attention", "出现异常之后，库里还是你的注意力"
    )
    t.require(mine[-1] < mine[0], f"the loss does not fall: {mine}", f"损失没有下降：{mine}")
    a, b = [2.0, 4.0, 5.0], [2.0, 4.0 + t.integers(1, 9) / 8, 4.9]
    t.close(learner.largest_difference(a, b), (b[1] - a[1]) / a[1], f"largest_difference({a}, {b})", 1e-6)
    t.note(
        f"loss {mine[0]:.3f} → {mine[-1]:.3f} in {STEPS} steps, at most {max(abs(x - y) / y for x, y in zip(mine, theirs)):.1e} from PyTorch's",
        f"{STEPS} 步内损失 {mine[0]:.3f} → {mine[-1]:.3f}，与 PyTorch 的差至多 {max(abs(x - y) / y for x, y in zip(mine, theirs)):.1e}",
    )
