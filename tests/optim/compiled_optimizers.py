"""Adam's step compiled without a GPU, in a process that interprets nothing: what tests of the optimizers start."""

import torch

from weft.bench.compile_check import resource_usage
from weft.definition import ARCHITECTURES, SHARED_LIMIT
from weft.operators.launch import compiling_for
from weft.operators.optimizer.multi_tensor import Codes, Entry, Table
from weft.operators.optimizer.rules import ADAM

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
FLAGS = {"scale": torch.ones(1), "found": torch.ones(1), "max_norm": 1.0, "guarded": True, "zeroed": True}
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def one(dtype, n=5000):
    return torch.empty(n, dtype=dtype, device="meta")


def entry(dtype, kept, rounding="nearest", amsgrad=False, codes=None):
    moments = 3 if amsgrad else 2
    states = (*[one(kept)] * moments, *[one(torch.int16)] * (rounding == "split"))
    made = None if codes is None else Codes((one(FP32, 20),) * moments, *codes)
    return Entry(one(dtype), states, one(FP32, 1), {**OPTIONS, "amsgrad": amsgrad}, 0, rounding, dtype, codes=made)


# Architectures, and entries that are stepped together.
CASES = [
    (ARCHITECTURES, [entry(FP32, FP32, amsgrad=True), entry(FP16, FP16), entry(BF16, BF16)]),
    (ARCHITECTURES, [entry(BF16, FP32, "split"), entry(BF16, BF16, "stochastic")]),
    ((80, 90), [entry(BF16, torch.uint8, codes=(256,)), entry(BF16, FP32)]),
]

if __name__ == "__main__":
    for architectures, entries in CASES:
        for sm in architectures:
            made = []
            with compiling_for(sm, lambda *kernel, into=made: into.append(kernel)):
                table = Table(ADAM, entries)
                table.set_group(0, OPTIONS, 1.0)
                table.launch(**FLAGS)
            assert [name for name, *_ in made] == ["gradient_norm", "update"]
            for _, cubin, shared, threads, _ in made:
                usage = resource_usage(cubin)
                assert usage["STACK"] == 0 and usage["REG"] * threads <= 65536, (sm, usage)
                assert shared <= SHARED_LIMIT[sm], (sm, usage)
