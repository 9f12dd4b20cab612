"""Products of tensor-parallel layers that overlap with their communication, over symmetric memory.

M rows of a rank's activations (all ranks' together: R = ranks x M), K terms, N columns of this rank's weight.

    AllGatherMatmul      y [R, N] = every rank's x [M, K], one after another, times weightᵀ: copy engines bring the other
                         ranks' rows while the own ones are multiplied
    MatmulReduceScatter  y [M, N] = this rank's rows of the sum over the ranks of x [R, K] times weightᵀ: a ring, in which
                         each product adds what came from the left and writes its result into the memory of the right

Source of both decompositions: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"
(ASPLOS). Whether they beat NCCL and one product is measured for each shape on the ranks at hand.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.comm.symmetric.memory import SymmetricMemory
from weft.comm.symmetric.stream_order import StreamOrder
from weft.comm.symmetric.timed import slowest_us
from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan, why_not
from weft.operators.launch import target_sm

MOST_BYTES = 256 << 20
NCCL = "nccl"
PRODUCTS = ("torch", "hopper")  # cuBLAS, and weft's main loop, which adds a residual without a copy of it
IN_GRAPH = 4  # calls timed in a graph
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]


@functools.lru_cache(256)
def _plan(x: Any, weight: Any, dtype: torch.dtype, added: bool, device: torch.device) -> HopperPlan:
    a, b = (torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides in (x, weight))
    residual = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device="meta") if added else None
    return HopperPlan(a, b.t(), residual=residual, device=device)


def by_torch(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None) -> None:
    """``out`` = x · weightᵀ (+ residual). ``out`` is contiguous and may be another rank's memory."""
    if residual is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(residual, x, weight.t(), out=out)


def by_hopper(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None) -> None:
    forms = ((tuple(t.shape), t.stride()) for t in (x, weight))
    plan = _plan(*forms, x.dtype, residual is not None, x.device)
    plan(x, weight.t(), out, residual=residual)


def all_gather_matmul(
    memory: Any, side: Any, x: Tensor, weight: Tensor, out: Tensor, product: Product = by_torch
) -> None:
    """``side`` is a context in which copies are queued beside the products of the current stream. ``out`` [ranks, M, N]."""
    n, me = memory.ranks, memory.rank
    with side:
        memory.barrier()  # the call before has read what is overwritten now
        for k in range(1, n):
            to = (me + k) % n
            memory.of(to, (n, *x.shape), x.dtype)[me].copy_(x)
            memory.signal(to)
    product(x, weight, out[me], None)
    slots = memory.of(me, (n, *x.shape), x.dtype)
    for k in range(1, n):
        source = (me - k) % n
        memory.wait(source)
        product(slots[source], weight, out[source], None)


def matmul_reduce_scatter(memory: Any, x: Tensor, weight: Tensor, out: Tensor, product: Product = by_torch) -> None:
    """In step s a rank multiplies part (rank - 1 - s), adds what the left one made of it and passes it on; the last one is
    its own. Sums are rounded to x's dtype once a rank, as in NCCL's ring."""
    n, me = memory.ranks, memory.rank
    left, right = (me - 1) % n, (me + 1) % n
    parts = x.view(n, -1, x.shape[1])
    received = memory.of(me, (n - 1, *out.shape), out.dtype)
    sent = memory.of(right, (n - 1, *out.shape), out.dtype)
    memory.barrier()  # the call before has read what is overwritten now
    for step in range(n):
        if step:
            memory.wait(left)
        last = step == n - 1
        product(parts[(me - 1 - step) % n], weight, out if last else sent[step], received[step - 1] if step else None)
        if not last:
            memory.signal(right)


class Overlapped:
    """What both have. All ranks make the same calls in the same order.

    Args:
        group: of ``weft.comm.run.join`` over NCCL (over Gloo the collective and one product are the only way).
        most_bytes: of what a rank receives; larger calls go to NCCL and one product.

    Raises:
        RuntimeError: PyTorch cannot map the peers' memory.
    """

    what = ""

    def __init__(self, group: Group, most_bytes: int = MOST_BYTES):
        self.group, self.most_bytes = group, most_bytes
        self.measured_us: dict[Any, dict[str, float]] = {}
        if group.backend == "nccl":
            self._memory = SymmetricMemory(group, most_bytes)
            self._order = StreamOrder(self.what)
            self._side = torch.cuda.Stream()

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` and ``weight`` [N, K]: 16-bit floats or fp32, contiguous. The first call of a shape measures the ways,
        some 20 of its runs (not while a CUDA graph is captured: then NCCL and one product).

        Raises:
            ValueError: shapes or dtypes that do not go together.
        """
        self._check(x, weight)
        shape = self._shape(x, weight)
        out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        if out.shape != shape or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(
                f"{self.what}: out is {list(out.shape)} {out.dtype}; expected contiguous {list(shape)} {x.dtype}"
            )
        key = self._key(x, weight)
        if x.is_cuda and key not in self.measured_us and not torch.cuda.is_current_stream_capturing():
            ways = {name: functools.partial(self.run, name, x, weight, out) for name in self.ways(x, weight)}
            self.measured_us[key] = slowest_us(self.group, ways, IN_GRAPH)
        self.run(self.explain(x, weight), x, weight, out)
        return out

    def explain(self, x: Tensor, weight: Tensor) -> str:
        """The way that a call takes: the fastest one measured; ``nccl`` where nothing is measured."""
        found = self.measured_us.get(self._key(x, weight), {NCCL: 0.0})
        return min(found, key=lambda name: found[name])

    def ways(self, x: Tensor, weight: Tensor) -> list[str]:
        """The ways that take a call: ``nccl``, and the overlapped one by each product."""
        if self._received_bytes(x, weight) > self.most_bytes:
            return [NCCL]
        part = x[: len(x) // self.group.size]
        hopper = (
            target_sm(x.device) == 90
            and x.dtype in SIXTEEN_BITS
            and not why_not(part, weight.t(), x.dtype)
            and part.numel() * x.element_size() % 16 == 0
        )
        return [NCCL, *(PRODUCTS if hopper else PRODUCTS[:1])]

    def run(self, way: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """One call by one way."""
        if way == NCCL:
            self._nccl(x, weight, out)
        else:
            self._order.enter()
            self._overlapped(x, weight, out, by_hopper if way == "hopper" else by_torch)

    def _key(self, x: Tensor, weight: Tensor) -> Any:
        return (*x.shape, weight.shape[0], x.dtype)

    def _check(self, x: Tensor, weight: Tensor) -> None:
        if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
            raise ValueError(
                f"{self.what}: x is {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}; expected "
                "[rows, K] and [N, K] of one dtype"
            )
        if not (x.is_contiguous() and weight.is_contiguous()):
            raise ValueError(
                f"{self.what}: x has strides {x.stride()}, weight {weight.stride()}; expected contiguous ones"
            )

    def _shape(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        raise NotImplementedError

    def _received_bytes(self, x: Tensor, weight: Tensor) -> int:
        raise NotImplementedError

    def _nccl(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def _overlapped(self, x: Tensor, weight: Tensor, out: Tensor, product: Product) -> None:
        raise NotImplementedError


class AllGatherMatmul(Overlapped):
    """x [M, K] and weight [N, K] -> [ranks * M, N]: a layer whose columns are split over ranks, of activations whose rows
    are (sequence parallelism)."""

    what = "all_gather_matmul"

    def _shape(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        return self.group.size * x.shape[0], weight.shape[0]

    def _received_bytes(self, x: Tensor, weight: Tensor) -> int:
        return self.group.size * x.numel() * x.element_size()

    def _nccl(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        gathered = torch.empty((self.group.size * x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
        self.group.transport.all_gather(gathered, x, True)
        by_torch(gathered, weight, out, None)

    def _overlapped(self, x: Tensor, weight: Tensor, out: Tensor, product: Product) -> None:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        parts = out.view(self.group.size, *x.shape[:1], weight.shape[0])
        all_gather_matmul(self._memory, torch.cuda.stream(self._side), x, weight, parts, product)
        current.wait_stream(self._side)


class MatmulReduceScatter(Overlapped):
    """x [ranks * M, K] and weight [N, K] -> [M, N]: a layer whose terms are split over ranks."""

    what = "matmul_reduce_scatter"

    def _check(self, x: Tensor, weight: Tensor) -> None:
        super()._check(x, weight)
        if len(x) % self.group.size:
            raise ValueError(f"{self.what}: x has {len(x)} rows; expected a multiple of {self.group.size} ranks")

    def _shape(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        return x.shape[0] // self.group.size, weight.shape[0]

    def _received_bytes(self, x: Tensor, weight: Tensor) -> int:
        n = self.group.size
        return (n - 1) * (x.shape[0] // n) * weight.shape[0] * x.element_size()

    def _nccl(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        whole = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        by_torch(x, weight, whole, None)
        self.group.transport.reduce_scatter(out, whole, "sum", True)

    def _overlapped(self, x: Tensor, weight: Tensor, out: Tensor, product: Product) -> None:
        matmul_reduce_scatter(self._memory, x, weight, out, product)
