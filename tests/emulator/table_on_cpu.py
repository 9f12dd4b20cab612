"""A step of an optimizer in CUDA C++, emulated on a CPU: the launch that a call of the operator computes from its table of
pointers, with all tensors side by side in one stretch of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from cuda_on_cpu import bytes_of, job

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench import cases, verify  # noqa: E402
from weft.definition import Operator  # noqa: E402
from weft.operators.cuda import CudaPlan  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.optimizer.multi_tensor import CudaTable  # noqa: E402

BESIDE = 0xA5  # what lies between tensors
BUFFERS = (0, 1, 2, 3, 8, 5)  # of the kernel's pointers, one after the other

LAUNCH = """
i64 *const table = job.buffer(1), *const gradients = job.buffer(0);
const i64 *s = job.shape, shift = reinterpret_cast<i64>(job.buffers[4]) - s[0];
for (i64 row = 0; row < s[1]; row++) {
  if (gradients[row]) gradients[row] += shift;
  for (int word : {0, 1, 2, 6, 7, 13, 14})
    if (table[row * 16 + word]) table[row * 16 + word] += shift;
}
const auto at = [&](int i) { return reinterpret_cast<float *>(s[i] ? s[i] + shift : 0); };
job.run([&] { KERNEL(gradients, table, POINTERS, s[2], s[3]); });
"""


@dataclass(frozen=True)
class Factors:
    """What a step scales, clips and skips by (None: it does not). Powers of two, by which gradients are divided beforehand, so
    that the result is the same."""

    clip: float | None = None
    scale: float | None = None
    found: float | None = None

    @property
    def factor(self) -> float:
        return (self.clip or 1.0) / (self.scale or 1.0)


class TableStep:
    """What an operator's implementation ``cuda`` launches for a draw of its inputs.

    Args:
        changed: what differs here from a GPU: an object, a name in it, a value.
        seed: of the order in which threads run.
        factors: of the step, or None.
    """

    def __init__(
        self,
        operator: Operator,
        draw: verify.Draw,
        changed: Iterable[tuple[Any, str, Any]],
        seed: int,
        factors: Factors | None = None,
    ):
        self.draw, self.seed, self.factors = draw, seed, factors
        self.places: list[tuple[int, int]] = []
        sizes = [t.nbytes for t in cases.tensors(draw.arguments)]
        self.memory = torch.full((sum(n + 128 for n in sizes) + 576,), BESIDE, dtype=torch.uint8)
        self.memory = self.memory[-self.memory.data_ptr() % 64 :]
        self.memory = self.memory[: len(self.memory) // 16 * 16]
        self.end = 0
        placed = cases.map_tensors(self.place, draw.arguments)
        self.drawn = len(self.places)
        if factors:
            changed = [*changed, (CudaTable, "launch", self.launch_with_factors)]
            for g in placed["grads"]:
                g.div_(factors.factor)
        launches = []
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            for change in changed:
                patch.setattr(*change)
            patch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
            operator.find("cuda").function(**placed)
        ((self.plan, self.tensors),) = launches

    @property
    def launch_with_factors(self) -> Callable[[CudaTable], None]:
        """``CudaTable.launch`` of a step with factors, where the norm has been computed."""
        factors, launch = self.factors, CudaTable.launch

        def launched(table: CudaTable) -> None:
            given = {
                n: self.place(torch.tensor([v])) for n in ("scale", "found") if (v := getattr(factors, n)) is not None
            }
            self.control = table.control = self.place(torch.tensor([factors.clip or 7.0, 7.0, 7.0, 7.0]))
            launch(table, max_norm=factors.clip, measured=True, **given)

        return launched

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """A copy in ``memory`` that is as far from a multiple of 16 bytes as the tensor is."""
        begin = -(-self.end // 16) * 16 + 32 + t.data_ptr() % 16
        self.end = begin + t.nbytes
        self.places.append((begin, self.end))
        there = self.memory[begin : self.end].view(t.dtype) if t.numel() else t.clone()
        return there.as_strided(t.shape, t.stride()).copy_(t) if t.numel() else there

    @property
    def launch(self) -> str:
        buffers = BUFFERS[2 : len(self.tensors) - 4 * bool(self.factors)]
        pointers = ", ".join(
            [*(f"job.buffer({i})" for i in buffers), *(f"at({i})" for i in range(4, 8) if self.factors)]
        )
        return LAUNCH.replace("KERNEL", self.plan.expression).replace("POINTERS", pointers)

    def job(self) -> bytes:
        own = self.tensors[:-4] if self.factors else self.tensors
        besides = [t.data_ptr() for t in self.tensors[len(own) :]]
        buffers = {i: bytes_of(t.clone()) for i, t in zip(BUFFERS, own, strict=False)}
        buffers |= {4: self.memory.numpy().tobytes(), 10: bytes(8)}  # so that all blocks run together
        shape = (self.memory.data_ptr(), len(self.tensors[1]), *(s.value for s in self.plan.scalars), *besides)
        return job(self.plan, self.seed, buffers, shape=shape)

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what the operator does not allow."""
        memory = torch.frombuffer(bytearray(found[: len(self.memory)]), dtype=torch.uint8)
        if any(found[len(self.memory) : -8]):
            return "arrivals are counted on"
        if self.factors and self.factors.found:
            self.control[3] += 1
            return "" if memory.equal(self.memory) else "a step that is skipped is not counted alone"
        beside = torch.ones(len(memory), dtype=torch.bool)
        for begin, end in self.places:
            beside[begin:end] = False
        if bool((memory[beside] != BESIDE).any()):
            return "written beside a tensor"

        def step(**arguments) -> None:
            for t, (begin, end) in zip(cases.tensors(arguments), self.places[: self.drawn], strict=True):
                if t.numel():
                    t.copy_(memory[begin:end].clone().view(t.dtype).as_strided(t.shape, t.stride()))
            if self.factors:
                for g in arguments["grads"]:
                    g.mul_(self.factors.factor)

        return self.draw.judge(step).reason
