"""Prints, for rows of some lengths, the bytes that softmax's kernel loads at once on sm_90, as JSON."""

import json
import re
import sys

import torch

from weft.operators import launch
from weft.operators.softmax.dispatch import FORWARD


def widths(n: int, dtype: torch.dtype) -> list[int]:
    with launch.compiling_for(90, lambda *_: None):
        x = torch.empty((64, n), dtype=dtype, device="meta")
        plan = FORWARD.kernel("triton").of((x,), -1, False)
    launch.learn_divisors(plan.kernel)
    with launch._stub_driver(90):
        options = {**plan.constants, "num_warps": plan.num_warps, "num_stages": plan.num_stages}
        ptx = plan.kernel.warmup(dtype, dtype, *plan.scalars, grid=plan.grid, **options).asm["ptx"]
    loads = re.findall(r"ld\.global[.\w:]*?(?:\.v([24]))?\.b(\d+)", ptx)
    return sorted({int(count or 1) * int(bits) // 8 for count, bits in loads})


points = [(n, dtype) for n in (4096, 4104, 4100, 4102, 4101) for dtype in ("bfloat16", "float32")]
json.dump({f"{n} {dtype}": widths(n, getattr(torch, dtype)) for n, dtype in points}, sys.stdout)
