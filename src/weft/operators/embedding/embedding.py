"""``embedding(ids, table)``: rows of a table, and the table's gradient as sums in a fixed order."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload, workloads
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.autograd import reference_gradients as gradients_of_reference
from weft.operators.call import Choice, eager, guarded
from weft.operators.checks import check_flag, check_values
from weft.operators.embedding.dispatch import BACKWARD, FORWARD, flat
from weft.operators.random_inputs import LAYOUTS, random_tensor


def torch_embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    return F.embedding(ids, table, padding_idx) if table.numel() else looked_up(ids, table, padding_idx)


def looked_up(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """PyTorch's, with NaN and no gradient for an id out of range: its own raises on a CPU, and on a GPU stops the device."""
    if not table.numel():  # PyTorch's gradient of no columns on CUDA: an illegal access (2.11)
        return table.sum() * table.new_full((*ids.shape, table.shape[1]), torch.nan)
    outside = (ids < 0) | (ids >= table.shape[0])
    return F.embedding(ids.masked_fill(outside, 0), table, padding_idx).masked_fill(outside[..., None], torch.nan)


def reference(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Its gradient is summed in fp32 or wider (PyTorch's own on a CPU is rounded after every addition)."""
    wide = table if table.dtype == torch.float64 else table.float()
    return looked_up(ids, wide, padding_idx).to(table.dtype)


TRITON = FORWARD.kernel("triton")


class Embedding(KernelFunction):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
        out = table.new_empty((*ids.shape, table.shape[1]))
        if out.numel():
            TRITON.of((ids, table), padding_idx)(ids, table, out)
        ctx.save_for_backward(ids, table)
        ctx.padding_idx = padding_idx
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ids, table = ctx.saved_tensors
        if torch.is_grad_enabled():
            look_up = functools.partial(reference, ids, padding_idx=ctx.padding_idx)
            return None, *gradients_of_reference(look_up, (table,), (True,), (dy,)), None
        if not dy.numel():
            return None, torch.zeros_like(table), None
        dy, vector = dy.reshape(ids.numel(), table.shape[1]), flat(ids)  # a copy only where rows have no one stride
        assert vector is not None  # forward launched with it
        dtable = torch.empty_like(table, memory_format=torch.contiguous_format)  # also of a transposed table
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx % table.shape[0]
        BACKWARD.of((vector, dy, dtable), padding)(vector, dy, dtable)
        return None, dtable, None


def embedding_triton(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    return differentiable(Embedding, ids, table, padding_idx)


def liger(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    if padding_idx is not None:
        raise Declined("Liger's embedding has no padding index")
    return LigerEmbeddingFunction.apply(table, ids)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Ids [N] (or [rows, N / rows]) of a table [V, D]: evenly drawn; or half of them one token, or all."""
    n, v, rows = w["N"], w["V"], w.option("rows", 0)
    table = random_tensor(g, (v, w["D"]), w.dtype, device, layout=w.option("layout", "contiguous"))
    padding = w.option("padding")
    return {"ids": _ids(w, g, device, (rows, n // rows) if rows else (n,), v), "table": table, "padding_idx": padding}


def _ids(w: Workload, g: Any, device: str, shape: tuple[int, ...], v: int) -> Tensor:
    dtype = torch_dtype(w.option("ids", "int64"))
    at = g.device if g is not None else device
    if device == "meta":
        return torch.zeros(shape, device=device, dtype=dtype)
    ids = torch.randint(0, v, shape, generator=g, device=at)
    one = torch.randint(0, v, (1,), generator=g, device=at)
    if w.option("tokens") == "one":
        ids = one.expand(shape).clone()
    if w.option("tokens") == "half":
        ids = torch.where(torch.rand(shape, generator=g, device=at) < 0.5, one, ids)
    ids = ids.to(device, dtype)
    return ids.t().contiguous().t() if w.option("ids_layout") == "transposed" else ids


def distinct(w: Workload) -> int:
    """Rows of the table that N ids name: the expected number where they are evenly drawn."""
    n, v = w["N"], w["V"]
    if w.option("tokens") == "one":
        return min(n, 1)
    n = n // 2 if w.option("tokens") == "half" else n
    return int(v * (1 - (1 - 1 / v) ** n)) if v else 0


def cost(w: Workload, direction: str) -> Cost:
    n, row = w["N"], w["D"] * w.bytes_per_element
    ids = n * (4 if w.option("ids") == "int32" else 8)
    if direction == "forward":
        return Cost(reads=ids + distinct(w) * row, writes=n * row, vector_flops=n)
    return Cost(reads=ids + n * row, writes=w["V"] * row, vector_flops=n * w["D"])


def _gradient(dy: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None = None) -> tuple[Tensor]:
    rows = dy.reshape(ids.numel(), table.shape[1])
    if padding_idx is not None:
        rows = rows.masked_fill((ids.reshape(-1) == padding_idx % table.shape[0])[:, None], 0)
    total = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    return (total.index_add_(0, ids.reshape(-1).long(), rows.float()).to(table.dtype),)


def _terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """A sum with random signs may cancel: how large its terms are."""
    (dy,) = gradients
    ids, table, padding_idx = arguments["ids"], arguments["table"], arguments["padding_idx"]
    return [_gradient(dy.square(), ids, table, padding_idx)[0].double().sqrt()]


def _last_once(dy: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None = None) -> tuple[Tensor]:
    """Repeated ids overwrite instead of adding."""
    out = torch.zeros_like(table)
    out[ids.reshape(-1).long()] = dy.reshape(ids.numel(), table.shape[1])
    return (out,)


TUNED = (64, 256, 1024, 4096, 8192)  # columns

embedding = Operator(
    name="embedding",
    axes={"N": "ids", "V": "rows of the table", "D": "columns of the table"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": LAYOUTS,
        "rows": range(1, 2**31),
        "ids": ("int32", "int64"),
        "ids_layout": ("contiguous", "transposed"),
        "tokens": ("even", "half", "one"),
        "padding": range(-(2**31), 2**31),
    },
    differentiable=("table",),
    tolerance={"forward": Tolerance(exact=True), "backward": Tolerance(scale=_terms, terms=lambda w: 32)},
    workloads={
        "verify": [
            *workloads("NVD", (1, 1, 1), (7, 5, 3), (40, 30, 100), (100, 9, 64), (3, 7, 1030), (0, 7, 5), (9, 7, 0)),
            *(workload(N=20, V=9, D=33, layout=at) for at in ("unaligned", "sliced", "strided", "transposed")),
            *(workload(N=24, V=9, D=16, rows=4, **other) for other in ({}, {"ids_layout": "transposed"})),
            workload(N=24, V=9, D=16, ids="int32"),
            *(workload(N=60, V=5, D=8, padding=padding) for padding in (2, -1)),
            workload(N=300, V=20, D=16, tokens="half"),
            workload(N=700, V=3, D=8, tokens="one"),
            workload(N=256, V=2, D=5),
        ],
        "full": [workload(N=2**14, V=1000, D=1024, tokens="half"), workload(N=2**16, V=128256, D=128)],
        "huge": [workload("bf16", N=2**17 + 1, V=2**15, D=2**14), workload("bf16", N=2**15, V=2**18 + 1, D=2**13)],
        "bench": [
            *workloads("NVD", (2**16, 128256, 4096), (2**20, 32000, 1024)),
            workload(N=2**16, V=128256, D=4096, tokens="half"),
        ],
        "quick": [workload(N=2**12, V=32000, D=1024)],
        "compile": [*workloads("NVD", (64, 100, 100), (640, 100, 4096)), workload(N=64, V=100, D=1024, ids="int32")],
        "tune": [workload(t, N=2**28 // d, V=32000, D=d) for t in ("fp32", "bf16") for d in TUNED],
        "model": [workload("bf16", N=8192, V=128256, D=4096)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("id moved", lambda ids, table, padding_idx=None: reference((ids + 1) % table.shape[0], table)),
        *mutants.usual(_gradient, "backward"),
        Mutant("repeated ids overwrite", _last_once, "backward"),
        Mutant("padding gets a gradient", mutants.changed(_gradient, padding_idx=lambda padding: None), "backward"),
    ],
)

embedding.implementation("triton", arch=">=sm_80")(embedding_triton)
peers.register(embedding, torch_embedding)
embedding.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@embedding.choice
@guarded
def choose(
    ids: Tensor, table: Tensor, padding_idx: int | None = None, *, check_ids: bool = False, direction: str = "forward"
) -> Choice:
    chosen = FORWARD.choose(ids, table, padding_idx)
    check_flag("embedding", "check_ids", check_ids)
    if check_ids:
        v = table.shape[0]
        expected = f"0 … {v - 1}" if v else "none: 'table' has no rows"
        check_values("embedding", "ids", ids, lambda t: (t < 0) | (t >= v), flag="check_ids", expected=expected)
    if direction == "forward" or chosen.implementation == "torch":
        return chosen
    return BACKWARD.choose(flat(ids), table.new_empty(ids.numel(), table.shape[1]), table, -1)


@embedding.function
def embedding_function(
    ids: Tensor, table: Tensor, padding_idx: int | None = None, *, check_ids: bool = False
) -> Tensor:
    """Rows of a table.

    Args:
        ids: any shape; int64 or int32, 0 … V - 1.
        table: [V, D]; float32, float16 or bfloat16.
        padding_idx: a row whose gradient is zero (negative ones count from the end); None for none.
        check_ids: raise ValueError for an id out of range: waits for the device. Without it such a row is NaN.

    Returns:
        [..., D], in the table's dtype.

    Raises:
        TypeError: tensors of other dtypes, a ``padding_idx`` that is no int, a ``check_ids`` that is no bool.
        ValueError: a table that is no matrix, devices that differ, a padding_idx or (with ``check_ids``) an id out of range.

    The gradient is sorted and summed in fp32 in a fixed order: the same bits every time. It is dense.
    """
    ready = FORWARD.of((ids, table), padding_idx) if check_ids is False and eager(ids, table, autocast=True) else None
    if ready is not None:
        out = table.new_empty((*ids.shape, table.shape[1]))
        ready(ids, table, out)
        return out
    if choose(ids, table, padding_idx, check_ids=check_ids).implementation == "torch":
        # a table on a CPU is widened for its gradient
        summed = not table.is_cuda and table.requires_grad and torch.is_grad_enabled()
        return (reference if summed else looked_up)(ids, table, padding_idx)
    return embedding_triton(ids, table, padding_idx)
