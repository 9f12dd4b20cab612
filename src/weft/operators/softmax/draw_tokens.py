"""``draw_tokens(logits, temperature, uniform, top_k, top_p, min_p)``: a token of each row's softmax, or of its most probable
tokens alone, or the most probable one.

Each row is read once, in chunks, by as many programs; a second launch finds the chunk and reads that again: bandwidth is the
limit. Where some rows leave tokens out, a launch before finds the least logit that each row keeps (``least_kept.cu``). A row's
token is a function of its own logits and numbers, whatever other rows there are.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded, on_gpu, traced
from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.configs import bucket
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.random_inputs import random_tensor

# R rows, V tokens of the vocabulary
CHUNK = 4096  # tokens of a program
SOURCE = Path(__file__).parent / "least_kept.cu"
THREADS, GROUP, MOST_BLOCKS = (
    1024,
    8,
    8,
)  # of a row of least_kept.cu: threads of a block, logits that one reads at once, blocks
FILTERS = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}


@triton.jit
def weights_of(x, largest, temperature, least):
    """exp((x - largest) / temperature), 0 of -inf and of less than ``least``; not looked at where the temperature is 0."""
    kept = (x > float("-inf")) & (x >= least)
    return tl.where(kept, tl.exp((x - largest) / tl.where(temperature > 0, temperature, 1.0)), 0.0)


@triton.jit
def sums_of_chunks(
    logits_ptr, temperature_ptr, least_ptr, parts_ptr, places_ptr, V, row, of_temperature,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts [R, chunks, 3]: a chunk's largest logit (infinite if there is a NaN), its smallest if that is 0 (else a number that
    is not), the sum of its weights, or where the temperature is 0 places [R, chunks]: the first token of the largest logit.
    least [R]: less than it has no weight. Each reduction costs about as much as the memory, so there are no others."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = c * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + r * row + i, mask=i < V, other=float("-inf")).to(tl.float32)
    least = tl.load(least_ptr + r) if FILTERED else float("-inf")
    temperature = tl.load(temperature_ptr + r * of_temperature)
    at = r * tl.num_programs(1) + c
    largest = tl.max(tl.where(x == x, x, float("inf")), 0)
    tl.store(parts_ptr + 3 * at, largest)
    if largest == 0:
        tl.store(parts_ptr + 3 * at + 1, tl.min(tl.where(i < V, x, 0.0), 0))
    else:
        tl.store(parts_ptr + 3 * at + 1, largest)
    if temperature > 0:
        tl.store(parts_ptr + 3 * at + 2, tl.sum(weights_of(x, largest, temperature, least), 0))
    else:
        tl.store(places_ptr + at, tl.min(tl.where((x == largest) & (i < V), i, V - 1), 0))


@triton.jit
def token_of_row(
    logits_ptr, temperature_ptr, uniform_ptr, least_ptr, parts_ptr, places_ptr, y_ptr, V, row, of_temperature, of_uniform,
    chunks, FILTERED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at, there = r * chunks + c, c < chunks
    largest = tl.load(parts_ptr + 3 * at, mask=there, other=float("-inf"))
    smallest = tl.load(parts_ptr + 3 * at + 1, mask=there, other=float("inf"))
    top, bottom = tl.max(largest, 0), tl.min(smallest, 0)
    broken = (tl.abs(top) == float("inf")) | ((top == 0) & (bottom == 0))
    temperature = tl.load(temperature_ptr + r * of_temperature)
    if temperature > 0:
        least = tl.load(least_ptr + r) if FILTERED else float("-inf")
        # a chunk's sum is 0 where its largest logit is not kept
        of_chunk = weights_of(largest, top, temperature, float("-inf"))
        sums = tl.load(parts_ptr + 3 * at + 2, mask=there, other=0.0) * of_chunk
        target = tl.load(uniform_ptr + r * of_uniform) * tl.sum(sums, 0)
        chosen = tl.min(tl.where((tl.cumsum(sums, 0) > target) & (sums > 0), c, CHUNKS), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0, c, 0), 0))  # rounding may take the target to the sum
        before = tl.sum(tl.where(c < chosen, sums, 0.0), 0)
        i = chosen * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + r * row + i, mask=i < V, other=float("-inf")).to(tl.float32)
        weights = weights_of(x, top, temperature, least)
        token = tl.min(tl.where((before + tl.cumsum(weights, 0) > target) & (weights > 0), i, V), 0)
        token = tl.minimum(token, tl.max(tl.where(weights > 0, i, 0), 0))
    else:
        place = tl.load(places_ptr + at, mask=there, other=V)
        token = tl.min(tl.where(largest == top, place, V), 0)
    tl.store(y_ptr + r, tl.where(broken, -1, token).to(tl.int64))


class DrawCall(Call):
    """Checked. ``given`` names the filters behind ``uniform``. Plans are called with the tensors and y."""

    def __init__(self, logits: Tensor, temperature: Tensor, uniform: Tensor, *rest: Any):
        *filters, self.given = rest
        self.x = self.logits = logits
        self.filters = dict(zip(self.given, filters, strict=True))
        self.numbers = {"temperature": temperature, "uniform": uniform, **self.filters}
        name = "draw_tokens"
        check_tensor(name, "logits", logits)
        check_shape(name, "logits", logits, logits.ndim == 2 and logits.shape[1] > 0, "[R, V] with V > 0")
        for argument, t in self.numbers.items():
            check_tensor(name, argument, t, (FILTERS.get(argument, torch.float32),))
            check_shape(name, argument, t, tuple(t.shape) == (len(logits),), f"({len(logits)},), one for each row")
            check_device(name, argument, t, "logits", logits)

    @property
    def empty(self) -> bool:
        return not len(self.logits)

    @property
    def traced(self) -> bool:
        return super().traced or traced(*self.numbers.values())


def launch(c: DrawCall) -> Any:
    (rows, v), row = c.logits.shape, c.logits.stride(0)
    block = min(CHUNK, bucket(v))
    chunks, (of_temperature, of_uniform, *_) = triton.cdiv(v, block), (t.stride(0) for t in c.numbers.values())
    filtered = {"FILTERED": bool(c.filters)}
    sums = Plan(sums_of_chunks, (rows, chunks), (v, row, of_temperature), {**filtered, "BLOCK": block}, 8)
    scalars = (v, row, of_temperature, of_uniform, chunks)
    token = Plan(token_of_row, (rows,), scalars, {**filtered, "CHUNKS": bucket(chunks), "BLOCK": block}, 8)
    kept = least_kept(c) if c.filters else None

    def run(logits: Tensor, temperature: Tensor, uniform: Tensor, *rest: Tensor) -> None:
        *filters, y = rest
        parts = torch.empty((rows, chunks, 3), dtype=torch.float32, device=logits.device)
        places = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        least = temperature  # not read
        if kept is not None:
            least = torch.empty(rows, dtype=torch.float32, device=logits.device)
            found = dict(zip(c.given, filters, strict=True))
            kept(logits, temperature, *(found.get(name, temperature) for name in FILTERS), least)
        sums(logits, temperature, least, parts, places)
        token(logits, temperature, uniform, least, parts, places, y)

    return run


def least_kept(c: DrawCall) -> CudaPlan:
    """The plan of the least logit that each row keeps, called with logits, temperature, top_k, top_p, min_p (any tensor for
    what is not given) and least, float32 [R]. As many blocks a row as there are multiprocessors for."""
    (rows, v), row = c.logits.shape, c.logits.stride(0)
    blocks = 1
    if c.sm >= 90:
        most = min(multiprocessors(c.logits.device) // rows, triton.cdiv(v, THREADS * GROUP), MOST_BLOCKS)
        blocks = 1 << max(most, 1).bit_length() - 1
    aligned = pointer_aligned(c.logits) and row * c.logits.itemsize % 16 == 0
    kernel = f"least_kept<{CTYPES[c.logits.dtype]}, {flags(aligned, blocks > 1)}, {THREADS}>"
    given = sum(1 << i for i, name in enumerate(FILTERS) if name in c.filters)
    strides = [c.numbers[n].stride(0) if n in c.numbers else 0 for n in ("temperature", *FILTERS)]
    scalars = (ctypes.c_int(v), ctypes.c_int(given), *map(ctypes.c_longlong, (row, *strides)))
    bins = THREADS // 2
    shared = 36 * bins + 1024 + (2 * blocks * 8 * (bins + 1) if blocks > 1 else 0)
    return CudaPlan(SOURCE, kernel, (rows * blocks, 1), THREADS, scalars, blocks, shared)


def unsupported(c: DrawCall) -> str:
    return "" if c.logits.stride(1) == 1 or c.logits.shape[1] == 1 else "rows that are not contiguous"


def triton_unsupported(c: DrawCall) -> str:
    return "top_k, top_p and min_p need the kernel in CUDA C++" if c.filters else unsupported(c)


def cuda_unsupported(c: DrawCall) -> str:
    if INTERPRETING and c.filters:
        return "Triton's interpreter does not run the kernel in CUDA C++"
    return unsupported(c) if c.filters else "no top_k, top_p or min_p"


DRAW = Dispatch(
    DrawCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route("triton", lambda c: True, "a row is read once, in chunks", launch, triton_unsupported),
    Route(
        "cuda",
        lambda c: True,
        "the least logit kept is found without a sort, then as in Triton",
        launch,
        cuda_unsupported,
    ),
    Route("torch", lambda c: True, "rows that are not contiguous: a copy would be needed"),
)


def reference(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _drawn(logits, temperature, uniform, top_k, top_p, min_p, torch.float64)


def in_torch(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _drawn(logits, temperature, uniform, top_k, top_p, min_p, torch.float32)


def _drawn(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    x = logits.to(dtype)
    largest, greedy = x.max(-1)
    weights = kept_weights(x, temperature, top_k, top_p, min_p)
    running = weights.cumsum(-1)
    found = (running <= uniform.to(dtype)[:, None] * running[:, -1:]).sum(-1)
    last = x.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    tokens = torch.where(temperature > 0, torch.minimum(found, last), greedy)
    return torch.where(largest.isfinite() & (x != 0).any(-1), tokens, -1)


def kept_weights(
    x: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """exp((x - its row's largest) / temperature) of logits [R, V], 0 of what top-k, min-p and top-p leave out."""
    largest = x.amax(-1, keepdim=True)
    t = torch.where(temperature > 0, temperature, 1.0).to(x.dtype)[:, None]
    share = None if min_p is None else min_p.to(x.dtype)[:, None]

    def weights_of(x: Tensor, least: Any = -torch.inf) -> Tensor:
        weights = torch.where((x > -torch.inf) & (x >= least), torch.exp((x - largest) / t), 0.0)
        return weights if share is None else torch.where(weights >= share, weights, 0.0)

    if top_k is None and top_p is None:
        return weights_of(x)
    ordered = x.sort(-1, descending=True).values
    least = torch.full_like(largest, -torch.inf)
    if top_k is not None:
        last = ordered.gather(1, (top_k.long() - 1).clamp(0, x.shape[1] - 1)[:, None])
        least = torch.where(top_k[:, None] > 0, last, least)
    if top_p is not None:
        weights = weights_of(ordered, least)
        running = weights.cumsum(-1)
        before = (running < top_p.to(x.dtype)[:, None] * running[:, -1:]) & (weights > 0)
        last = ordered.gather(1, before.sum(-1, keepdim=True).clamp(max=x.shape[1] - 1))
        least = torch.where(top_p[:, None] < 1, torch.maximum(least, last), least)
    return weights_of(x, least)


KS, PS, SHARES = (
    (0, 1, 2, 5, 20, 300, 2**31 - 1),
    (0.9, 1e-6, 0.3, 0.99, 1.0),
    (0.0, 0.05, 1.0, 1e-3),
)  # of rows in turn


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Logits of which some are likely; random numbers in the middle of the interval of one of the eight most likely tokens, and
    top_p in the middle of a logit's, so that rounding leads to no other. A third of the rows has temperature 0, or all have the
    option's."""
    r, v, values, keep = w["R"], w["V"], w.option("values", "normal"), w.option("keep", "")
    layout = w.option("layout", "contiguous")
    logits = random_tensor(g, (r, v), w.dtype, device, layout=layout)
    temperature = random_tensor(g, (r,), "fp32", device).abs() + 0.3
    if device != "meta":
        temperature[::3] = 0.0
    if "temperature" in dict(w.options):
        temperature = torch.full((r,), w.option("temperature", 1.0), device=device)
    uniform = random_tensor(g, (r,), "fp32", device).abs() % 1
    filters: dict[str, Any] = dict.fromkeys(FILTERS)
    rows = torch.arange(r, device=device)

    def of_rows(name: str, numbers: tuple[float, ...]) -> None:
        numbers = (w.option(name),) if name in w.options else numbers
        if keep in (name, "all") or name in w.options:
            filters[name] = torch.tensor(numbers, dtype=FILTERS[name], device=device)[rows % len(numbers)]

    of_rows("top_k", KS)
    of_rows("min_p", SHARES)
    of_rows("top_p", PS)
    if filters["min_p"] is not None and "min_p" not in w.options:
        less = random_tensor(g, (r,), "fp32", device).abs() % 0.5
        filters["min_p"] = torch.where(filters["min_p"] < 1, filters["min_p"] * (1 - less), 1.0)
    if device != "meta" and r:
        logits *= 3
        if values == "nonfinite":
            logits[::2, : v // 2] = random_tensor(g, (-(-r // 2), v // 2), w.dtype, device, values="nonfinite")
        if values == "masked":
            logits[:, ::3] = -torch.inf
        if values == "zeros":
            logits[::2] = 0
        if values == "ties":
            logits.round_()
        if values == "apart":  # most logits are far from the likely ones, some very far
            logits[:, 20:] -= 1000
            logits[:, -1:] = torch.finfo(logits.dtype).min
        x = logits.double()
        if filters["top_p"] is not None:
            p = kept_weights(x, temperature, filters["top_k"], None, filters["min_p"])
            p /= p.sum(-1, keepdim=True)
            last = kept_weights(x, temperature, filters["top_k"], filters["top_p"], filters["min_p"]) > 0
            least = torch.where(last, x, torch.inf).amin(-1, keepdim=True)
            middle = (p * ((x > least) + 0.5 * (x == least))).sum(-1).float()
            filters["top_p"] = torch.where((filters["top_p"] == 1) | middle.isnan(), filters["top_p"], middle)
        p = kept_weights(x, temperature, *filters.values())
        p /= p.sum(-1, keepdim=True)
        likely = p.topk(min(8, v), -1)
        at = likely.indices.gather(1, (rows % (likely.values > 0).sum(-1).clamp(min=1))[:, None])
        middle = (p.cumsum(-1) - p / 2).gather(1, at)[:, 0].clamp(0, 1 - 2**-24).float()
        uniform = torch.where(middle.isnan(), uniform, middle)
    return {"logits": logits, "temperature": temperature, "uniform": uniform, **filters}


def cost(w: Workload, direction: str) -> Cost:
    n, filters = w["R"] * w["V"], 3 if w.option("keep") == "all" else sum(name in w.options for name in FILTERS)
    filters = filters or bool(w.option("keep"))
    return Cost(n * w.bytes_per_element + (8 + 4 * filters) * w["R"], 8 * w["R"], vector_flops=4 * n, special_ops=n)


VOCABULARIES = (32000, 128256, 151936)  # Llama 2, Llama 3, Qwen
LLAMA, QWEN = (
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
)  # as their models ask for
draw_tokens = Operator(
    name="draw_tokens",
    axes={"R": "rows", "V": "tokens of the vocabulary"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "values": ("normal", "nonfinite", "masked", "zeros", "ties", "apart"),
        "layout": ("contiguous", "sliced", "strided", "unaligned"),
        "temperature": (0.0, 0.6, 1.0),
        "keep": ("top_k", "top_p", "min_p", "all"),
        "top_k": range(2**31),
        "top_p": (0.9, 0.95),
        "min_p": (0.05,),
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
            *(workload(R=r, V=v, keep="all") for r, v in ((3, 1), (8, 2), (35, 33), (50, 1000), (35, 4097), (2, 9000))),
            *(workload(R=14, V=3000, keep=x) for x in FILTERS),
            *(workload(R=30, V=2000, keep="all", values=x) for x in ("nonfinite", "masked", "zeros", "ties", "apart")),
            *(workload(R=14, V=300, keep="all", layout=x) for x in ("sliced", "strided", "unaligned")),
        ],
        "full": [
            workload(d, R=r, V=v, **more)
            for d in ("fp32", "fp16", "bf16")
            for r in (1, 33)
            for v in (32000, 151936, 262145)
            for more in ({}, {"keep": "all"}, {"keep": "top_p"}, {"keep": "all", "values": "ties"})
        ],
        "bench": [
            *(workload("bf16", R=r, V=v, temperature=1.0) for v in VOCABULARIES for r in (1, 32, 256)),
            *(workload("bf16", R=r, V=128256, **more) for r in (1, 64, 256) for more in (LLAMA, QWEN)),
        ],
        "quick": [workload("bf16", R=64, V=128256, temperature=1.0)],
        "compile": [
            workload(d, R=8, V=v, **more)
            for d in ("fp32", "fp16", "bf16")
            for v in (1000, 128256)
            for more in ({}, LLAMA)
        ],
        "model": [workload("bf16", R=r, V=128256, temperature=0.0) for r in (1, 256)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("temperature left out", mutants.changed(reference, temperature=lambda t: (t > 0).float())),
        Mutant("always the most probable", mutants.changed(reference, temperature=torch.zeros_like)),
        Mutant("the numbers of other rows", mutants.changed(reference, uniform=lambda u: u.roll(1))),
        Mutant("NaN taken for a number", mutants.changed(reference, logits=lambda x: x.nan_to_num(0.5, 9.0, -9.0))),
        *(Mutant(f"{name} left out", mutants.changed(reference, **{name: lambda t: None})) for name in FILTERS),
        Mutant("one more of top_k", mutants.changed(reference, top_k=lambda k: k if k is None else k + (k > 0).int())),
        Mutant("a smaller top_p", mutants.changed(reference, top_p=lambda p: p if p is None else p * 0.9)),
        Mutant("top_p of other rows", mutants.changed(reference, top_p=lambda p: p if p is None else p.roll(1))),
        Mutant("the second chunk left out", mutants.changed(reference, logits=lambda x: _without(x, CHUNK, 2 * CHUNK))),
    ],
)


def _without(x: Tensor, begin: int, end: int) -> Tensor:
    x = x.clone()
    x[:, begin:end] = -math.inf
    return x


def _given(named: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors of filters that are not None, and their names."""
    names = tuple(name for name in FILTERS if named.get(name) is not None)
    return tuple(named[name] for name in names), names


def _launched(kernel: str, logits: Tensor, temperature: Tensor, uniform: Tensor, **named: Any) -> Tensor:
    if not on_gpu(logits):
        return reference(logits, temperature, uniform, **named)
    filters, given = _given(named)
    tensors = (logits, temperature, uniform, *filters)
    y = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(y):
        DRAW.kernel(kernel).of(tensors, given)(*tensors, y)
    return y


draw_tokens.implementation("triton", arch=">=sm_80")(functools.partial(_launched, "triton"))
draw_tokens.implementation("cuda", arch=">=sm_80")(functools.partial(_launched, "cuda"))
peers.register(draw_tokens, in_torch)


@draw_tokens.choice
@guarded
def choose(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None,
    min_p: Tensor | None = None, *, direction: str = "forward",
) -> Choice:  # fmt: skip
    filters, given = _given({"top_k": top_k, "top_p": top_p, "min_p": min_p})
    return DRAW.choose(logits, temperature, uniform, *filters, given)


@draw_tokens.function
def draw_tokens_function(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A token of each row: the first at which the running sum of the weights exp(logit / temperature) passes ``uniform`` times
    their sum. Of rows that leave tokens out, only what is kept has a weight: first top-k, then min-p, then top-p of the rest.

    Args:
        logits: [R, V]; float32, float16 or bfloat16. -inf: never drawn.
        temperature: float32 [R]; 0 for the first of the largest logits.
        uniform: float32 [R], random numbers 0 <= u < 1.
        top_k: int32 [R]; logits that are at least the k-th largest; 0 for all. None: of no row.
        top_p: float32 [R]; the largest logits whose weights sum to this share; 1 for all.
        min_p: float32 [R]; weights of at least this share of the largest one; 0 for all.

    Equal logits are kept or left out together, so top-k may keep more than k and top-p more than it needs; the largest logit is
    always kept.

    Returns:
        int64 [R]; -1 in a row that holds NaN, whose largest logit is infinite, or whose logits are all 0. Sums are fp32 on a
        GPU, fp64 on a CPU, so where ``uniform`` lies within rounding between two tokens, it may be either, and so may a limit
        that lies between two logits.

    Raises:
        TypeError, ValueError: tensors of other dtypes, shapes or devices.
    """
    filters, given = _given({"top_k": top_k, "top_p": top_p, "min_p": min_p})
    tensors = (logits, temperature, uniform, *filters)
    if eager(*tensors) and (plan := DRAW.of(tensors, given)) is not None:
        y = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        plan(*tensors, y)
        return y
    all_numbers = (logits, temperature, uniform, top_k, top_p, min_p)
    if (chosen := choose(*all_numbers).implementation) == "torch":
        return (in_torch if on_gpu(logits) else reference)(*all_numbers)
    return _launched(chosen, logits, temperature, uniform, top_k=top_k, top_p=top_p, min_p=min_p)
