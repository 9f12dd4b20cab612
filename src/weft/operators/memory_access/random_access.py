"""``random_access(x, index)``: blocks of 32 to 512 bytes gathered from anywhere: what an embedding or a page table does."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.launch import Plan
from weft.operators.memory_access.machine import Machine
from weft.operators.memory_access.pattern import LARGEST, OPTIONS, Pattern, call, define, implement
from weft.operators.random_inputs import drawn

BLOCKS = (32, 64, 128, 256, 512)  # bytes
INDEX_BYTES = 8
TILE = 2048  # elements that a program moves


def reference(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def check(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    check_tensor("random_access", "x", x)
    check_tensor("random_access", "index", index, (torch.int64,))
    check_device("random_access", "index", index, "x", x)
    check_shape("random_access", "x", x, x.ndim == 2, "[blocks, elements of a block]")
    check_shape("random_access", "index", index, index.ndim == 1, "one dimension")
    return x, index


def result(x: Tensor, index: Tensor) -> Tensor:
    return torch.empty((index.numel(), x.shape[1]), dtype=x.dtype, device=x.device)


@triton.jit
def gather_blocks(x_ptr, index_ptr, y_ptr, n, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """y[i, :] = x[index[i], :] for i < n, x: [*, WIDTH]. One program moves BLOCKS of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (i < n)[:, None]
    source = tl.load(index_ptr + i, mask=i < n, other=0)
    col = tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + source[:, None] * WIDTH + col, mask=inside, eviction_policy="evict_last")
    tl.store(y_ptr + i[:, None] * WIDTH + col, x, mask=inside)


def plan(x: Tensor, index: Tensor) -> Plan:
    n, width = index.numel(), x.shape[1]
    blocks = TILE // width
    return Plan(gather_blocks, (triton.cdiv(n, blocks),), (n,), {"BLOCKS": blocks, "WIDTH": width})


def declines(x: Tensor, index: Tensor) -> str:
    width = x.shape[1]
    if width & (width - 1) or not 0 < width <= TILE:
        return f"blocks of {width} elements; the kernel takes powers of two up to {TILE}"
    return ""


def shape(w: Workload) -> tuple[int, int]:
    """(blocks, elements of a block); what does not fill a block is left out."""
    width = w.option("block", 64) // w.bytes_per_element
    return w["N"] // width, width


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Every block once, in random order: what is read is then no more than x."""
    blocks, width = shape(w)
    if device == "meta":
        index = torch.empty(blocks, dtype=torch.int64, device=device)
    else:
        index = torch.randperm(blocks, generator=g, device=g.device).to(device)
    return {"x": drawn(w, g, device, blocks * width).view(blocks, width), "index": index}


def cost(w: Workload, direction: str) -> Cost:
    blocks, width = shape(w)
    size = blocks * width * w.bytes_per_element
    return Cost(reads=size + blocks * INDEX_BYTES, writes=size)


def predicted_share(w: Workload, machine: Machine) -> float:
    """Useful bytes over bytes moved: a block brings whole fetches."""
    block = w.option("block", 64)
    fetched = -(-block // machine.fetch) * machine.fetch
    return (2 * block + INDEX_BYTES) / (fetched + block + INDEX_BYTES)


own: dict[str, Any] = {"result": result, "check": check, "declines": declines}
pattern = Pattern("random_access", reference, plan, tensors=lambda *tensors: (tensors, ()), **own)

random_access = Operator(
    **{
        **define(
            pattern,
            cost=cost,
            sizes=(64, 96, 1024, 4096),
            verify=[*(workload(N=4096, block=block) for block in BLOCKS), workload(N=2048, values="nonfinite")],
            bench=[workload(N=LARGEST, block=block) for block in BLOCKS],
            huge=workload("bf16", N=2**31 + 64),
            wrong=[
                Mutant("index ignored", lambda x, index: x[: len(index)].clone()),
                Mutant("neighbouring block", lambda x, index: x[(index + 1) % max(len(x), 1)]),
            ],
            predicted=predicted_share,
        ),
        "inputs": inputs,
        "options": {**OPTIONS, "block": BLOCKS},
    }
)
implement(random_access, pattern, lambda x, index: torch.index_select(x, 0, index))


@random_access.function
def random_access_function(x: Tensor, index: Tensor) -> Tensor:
    """Blocks of x, gathered.

    Args:
        x: [blocks, elements of a block]; float32, float16 or bfloat16.
        index: [N] of int64, each from 0 to below ``blocks`` (not checked on a GPU: a check would read every one twice).

    Returns:
        ``x[index]``, [N, elements of a block].

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: other numbers of dimensions, or two devices.
    """
    return call(pattern, x, index)
