import torch
from torch.nn import functional as F

REFUSED = {
    "attn_mask=mask": {"attn_mask": True, "is_causal": False},
    "attn_mask=mask, is_causal=True": {"attn_mask": True, "is_causal": True},
    "dropout_p=0.1, is_causal=True": {"dropout_p": 0.1, "is_causal": True},
    "is_causal=False": {},
    "is_causal=True": {"is_causal": True, "keys": 3},
}


def check(learner, t):
    B, H, S, D = 2, 6, t.integers(5, 12), 8
    for heads, options in (
        (6, {}),
        (6, {"scale": 0.3}),
        (2, {"enable_gqa": True}),
        (3, {"enable_gqa": True, "scale": 1.5}),
        (1, {"enable_gqa": True}),
    ):
        q, do = t.randn(B, H, S, D), t.randn(B, H, S, D)
        k, v = t.randn(B, heads, S, D), t.randn(B, heads, S, D)
        for layout in ("", ", q.transpose(1, 2) …"):
            if layout:
                q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
            exact = [x.double().requires_grad_() for x in (q, k, v)]
            expected = F.scaled_dot_product_attention(*exact, is_causal=True, **options)
            expected.backward(do.double())
            got = t.probe("gradients", q, k, v, do, options)
            what = f"sdpa(q, k, v, is_causal=True{''.join(f', {n}={x}' for n, x in options.items())}), q [{B}, {H}, {S}, {D}], k [{B}, {heads}, {S}, {D}]{layout}"
            t.close(got[0], expected.detach().float(), what, 1e-4, 1e-5)
            for name, mine, x in zip("qkv", got[1:], exact):
                t.close(mine, x.grad.float(), f"{name}.grad, {what}", 1e-4, 1e-5)
    for name, options in REFUSED.items():
        keys = S + options.pop("keys", 0) if "keys" in options else S
        k = t.randn(B, H, keys, D)
        if "attn_mask" in options:
            options = {**options, "attn_mask": torch.ones(S, keys, dtype=torch.bool)}
        t.raises(
            lambda k=k, options=options: t.probe("call", q, k, k, options),
            "NotImplementedError",
            f"sdpa(q, k, v, {name})",
        )
