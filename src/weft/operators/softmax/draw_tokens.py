"""``draw_tokens(logits, temperature, uniform)``: a token of each row's softmax, or the most probable one.

Each row is read once, in chunks, by as many programs; a second launch finds the chunk and reads that again: bandwidth is the
limit. A row's token is a function of its own logits and numbers, whatever other rows there are.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded, on_gpu
from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.configs import bucket
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import Plan
from weft.operators.random_inputs import random_tensor

# R rows, V tokens of the vocabulary
CHUNK = 4096  # tokens of a program


@triton.jit
def weights_of(x, largest, temperature):
    """exp((x - largest) / temperature), 0 of -inf; with temperature 0 what it gives is not looked at."""
    return tl.where(x > float("-inf"), tl.exp((x - largest) / tl.where(temperature > 0, temperature, 1.0)), 0.0)


@triton.jit
def sums_of_chunks(logits_ptr, temperature_ptr, parts_ptr, places_ptr, V, row, of_temperature, BLOCK: tl.constexpr):
    """parts [R, chunks, 3]: a chunk's largest logit (NaN if there is one), its smallest, the sum of its weights; places
    [R, chunks]: the first token of the largest logit."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = c * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + r * row + i, mask=i < V, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    smallest = tl.min(tl.where(i < V, x, float("inf")), 0)
    total = tl.sum(weights_of(x, largest, tl.load(temperature_ptr + r * of_temperature)), 0)
    place = tl.min(tl.where((x == largest) & (i < V), i, V - 1), 0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    at = r * tl.num_programs(1) + c
    tl.store(parts_ptr + 3 * at, tl.where(broken, float("nan"), largest))
    tl.store(parts_ptr + 3 * at + 1, smallest)
    tl.store(parts_ptr + 3 * at + 2, total)
    tl.store(places_ptr + at, place)


@triton.jit
def token_of_row(
    logits_ptr, temperature_ptr, uniform_ptr, parts_ptr, places_ptr, y_ptr, V, row, of_temperature, of_uniform, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at, there = r * chunks + c, c < chunks
    largest = tl.load(parts_ptr + 3 * at, mask=there, other=float("-inf"))
    smallest = tl.load(parts_ptr + 3 * at + 1, mask=there, other=float("inf"))
    place = tl.load(places_ptr + at, mask=there, other=V)
    broken = tl.max((largest != largest).to(tl.int32), 0) > 0
    top, bottom = tl.max(largest, 0), tl.min(smallest, 0)
    broken |= (tl.abs(top) == float("inf")) | ((top == 0) & (bottom == 0))
    temperature = tl.load(temperature_ptr + r * of_temperature)
    if temperature > 0:
        sums = tl.load(parts_ptr + 3 * at + 2, mask=there, other=0.0) * weights_of(largest, top, temperature)
        target = tl.load(uniform_ptr + r * of_uniform) * tl.sum(sums, 0)
        chosen = tl.min(tl.where((tl.cumsum(sums, 0) > target) & (sums > 0), c, CHUNKS), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0, c, 0), 0))  # rounding may take the target to the sum
        before = tl.sum(tl.where(c < chosen, sums, 0.0), 0)
        i = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + r * row + i, mask=i < V, other=float("-inf")).to(tl.float32)
        weights = weights_of(x, top, temperature)
        token = tl.min(tl.where((before + tl.cumsum(weights, 0) > target) & (weights > 0), i, V), 0)
        token = tl.minimum(token, tl.max(tl.where(weights > 0, i, 0), 0))
    else:
        token = tl.min(tl.where(largest == top, place, V), 0)
    tl.store(y_ptr + r, tl.where(broken, -1, token).to(tl.int64))


class DrawCall(Call):
    """Checked. Plans are called with ``(logits, temperature, uniform, y)``."""

    def __init__(self, logits: Tensor, temperature: Tensor, uniform: Tensor):
        self.x = self.logits = logits
        self.temperature, self.uniform = temperature, uniform
        name = "draw_tokens"
        check_tensor(name, "logits", logits)
        check_shape(name, "logits", logits, logits.ndim == 2 and logits.shape[1] > 0, "[R, V] with V > 0")
        for argument, t in (("temperature", temperature), ("uniform", uniform)):
            check_tensor(name, argument, t, (torch.float32,))
            check_shape(name, argument, t, tuple(t.shape) == (len(logits),), f"({len(logits)},), one for each row")
            check_device(name, argument, t, "logits", logits)

    @property
    def empty(self) -> bool:
        return not len(self.logits)


def launch(c: DrawCall) -> Any:
    (rows, v), row = c.logits.shape, c.logits.stride(0)
    block = min(CHUNK, bucket(v))
    chunks, of_temperature = triton.cdiv(v, block), c.temperature.stride(0)
    sums = Plan(sums_of_chunks, (rows, chunks), (v, row, of_temperature), {"BLOCK": block}, 8)
    scalars = (v, row, of_temperature, c.uniform.stride(0), chunks)
    token = Plan(token_of_row, (rows,), scalars, {"CHUNKS": bucket(chunks), "BLOCK": block}, 8)

    def run(logits: Tensor, temperature: Tensor, uniform: Tensor, y: Tensor) -> None:
        parts = torch.empty((rows, chunks, 3), dtype=torch.float32, device=logits.device)
        places = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        sums(logits, temperature, parts, places)
        token(logits, temperature, uniform, parts, places, y)

    return run


def unsupported(c: DrawCall) -> str:
    return "" if c.logits.stride(1) == 1 or c.logits.shape[1] == 1 else "rows that are not contiguous"


DRAW = Dispatch(
    DrawCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route("triton", lambda c: True, "a row is read once, in chunks", launch, unsupported),
    Route("torch", lambda c: True, "rows that are not contiguous: a copy would be needed"),
)


def reference(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    return _drawn(logits, temperature, uniform, torch.float64)


def _drawn(logits: Tensor, temperature: Tensor, uniform: Tensor, dtype: torch.dtype) -> Tensor:
    x = logits.to(dtype)
    largest, greedy = x.max(-1)
    t = torch.where(temperature > 0, temperature, 1.0).to(dtype)[:, None]
    weights = torch.where(x > -torch.inf, torch.exp((x - largest[:, None]) / t), 0.0)
    running = weights.cumsum(-1)
    found = (running <= uniform.to(dtype)[:, None] * running[:, -1:]).sum(-1)
    last = x.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    tokens = torch.where(temperature > 0, torch.minimum(found, last), greedy)
    return torch.where(largest.isfinite() & (x != 0).any(-1), tokens, -1)


def in_torch(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    return _drawn(logits, temperature, uniform, torch.float32)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Logits of which some are likely; random numbers in the middle of the interval of one of the eight most likely tokens, so
    that rounding leads to no other. A third of the rows has temperature 0, or all have the option's."""
    r, v, values = w["R"], w["V"], w.option("values", "normal")
    layout = w.option("layout", "contiguous")
    logits = random_tensor(g, (r, v), w.dtype, device, layout=layout)
    temperature = random_tensor(g, (r,), "fp32", device).abs() + 0.3
    if device != "meta":
        temperature[::3] = 0.0
    if "temperature" in dict(w.options):
        temperature = torch.full((r,), w.option("temperature", 1.0), device=device)
    uniform = random_tensor(g, (r,), "fp32", device).abs() % 1
    if device != "meta" and r:
        logits *= 3
        if values == "nonfinite":
            logits[::2, : v // 2] = random_tensor(g, (-(-r // 2), v // 2), w.dtype, device, values="nonfinite")
        if values == "masked":
            logits[:, ::3] = -torch.inf
        if values == "zeros":
            logits[::2] = 0
        t = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
        p = (logits.double() / t).softmax(-1)
        at = p.topk(min(8, v), -1).indices[torch.arange(r), torch.arange(r) % min(8, v)][:, None]
        middle = (p.cumsum(-1) - p / 2).gather(1, at)[:, 0].clamp(0, 1 - 2**-24).float()
        uniform = torch.where(middle.isnan(), uniform, middle)
    return {"logits": logits, "temperature": temperature, "uniform": uniform}


def cost(w: Workload, direction: str) -> Cost:
    n = w["R"] * w["V"]
    return Cost(n * w.bytes_per_element + 8 * w["R"], 8 * w["R"], vector_flops=4 * n, special_ops=n)


VOCABULARIES = (32000, 128256, 151936)  # Llama 2, Llama 3, Qwen
draw_tokens = Operator(
    name="draw_tokens",
    axes={"R": "rows", "V": "tokens of the vocabulary"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "values": ("normal", "nonfinite", "masked", "zeros"),
        "layout": ("contiguous", "sliced", "strided", "unaligned"),
        "temperature": (0.0, 1.0),
    },
    differentiable=(),
    tolerance=Tolerance(exact=True),
    workloads={
        "verify": [
            *(
                workload(R=r, V=v)
                for r, v in ((1, 1), (4, 2), (3, 33), (8, 1000), (5, 4096), (4, 4097), (9, 9000), (0, 5))
            ),
            *(workload(R=8, V=5000, values=x) for x in ("nonfinite", "masked", "zeros")),
            *(workload(R=8, V=300, layout=x) for x in ("sliced", "strided", "unaligned")),
        ],
        "full": [workload(d, R=r, V=v) for d in ("fp32", "bf16") for r in (1, 33) for v in (32000, 151936)],
        "bench": [workload("bf16", R=r, V=v, temperature=1.0) for v in VOCABULARIES for r in (1, 32, 256)],
        "quick": [workload("bf16", R=64, V=128256, temperature=1.0)],
        "compile": [workload(d, R=8, V=v) for d in ("fp32", "fp16", "bf16") for v in (1000, 128256)],
        "model": [workload("bf16", R=r, V=128256, temperature=0.0) for r in (1, 256)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("temperature left out", mutants.changed(reference, temperature=lambda t: (t > 0).float())),
        Mutant("always the most probable", mutants.changed(reference, temperature=torch.zeros_like)),
        Mutant("the numbers of other rows", mutants.changed(reference, uniform=lambda u: u.roll(1))),
        Mutant("NaN taken for a number", mutants.changed(reference, logits=lambda x: x.nan_to_num(0.5, 9.0, -9.0))),
        Mutant("the second chunk left out", mutants.changed(reference, logits=lambda x: _without(x, CHUNK, 2 * CHUNK))),
    ],
)


def _without(x: Tensor, begin: int, end: int) -> Tensor:
    x = x.clone()
    x[:, begin:end] = -math.inf
    return x


@draw_tokens.implementation("triton", arch=">=sm_80")
def draw_tokens_triton(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    if not on_gpu(logits):
        return reference(logits, temperature, uniform)
    y = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(y):
        DRAW.kernel("triton").of((logits, temperature, uniform))(logits, temperature, uniform, y)
    return y


peers.register(draw_tokens, in_torch)


@draw_tokens.choice
@guarded
def choose(logits: Tensor, temperature: Tensor, uniform: Tensor, *, direction: str = "forward") -> Choice:
    return DRAW.choose(logits, temperature, uniform)


@draw_tokens.function
def draw_tokens_function(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row: the first at which the running sum of exp(logit / temperature) passes ``uniform`` times the sum.

    Args:
        logits: [R, V]; float32, float16 or bfloat16. -inf: never drawn.
        temperature: float32 [R]; 0 for the first of the largest logits.
        uniform: float32 [R], random numbers 0 <= u < 1.

    Returns:
        int64 [R]; -1 in a row that holds NaN, whose largest logit is infinite, or whose logits are all 0. Sums are fp32 on a
        GPU, fp64 on a CPU, so where ``uniform`` lies within rounding between two tokens, it may be either.

    Raises:
        TypeError, ValueError: tensors of other dtypes, shapes or devices.
    """
    tensors = (logits, temperature, uniform)
    if eager(*tensors) and (plan := DRAW.of(tensors)) is not None:
        y = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        plan(*tensors, y)
        return y
    if choose(*tensors).implementation == "torch":
        return (in_torch if on_gpu(logits) else reference)(*tensors)
    return draw_tokens_triton(*tensors)
