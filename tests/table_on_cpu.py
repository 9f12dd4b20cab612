"""A step of an optimizer in CUDA C++, played on a CPU: the launch that a call of the operator computes from its table of
pointers, with all tensors side by side in one stretch of memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from cuda_on_cpu import bytes_of, job

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench import cases, verify  # noqa: E402
from weft.definition import Operator  # noqa: E402
from weft.operators.cuda import CudaPlan  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402

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
job.run([&] { KERNEL(gradients, table, POINTERS, s[2], s[3]); });
"""


class TableStep:
    """What an operator's implementation ``cuda`` launches for a draw of its inputs.

    Args:
        changed: what is another here than on a GPU: an object, a name in it, a value.
        seed: of the turns that threads take.
    """

    def __init__(self, operator: Operator, draw: verify.Draw, changed: Iterable[tuple[Any, str, Any]], seed: int):
        self.draw, self.seed = draw, seed
        self.places: list[tuple[int, int]] = []
        sizes = [t.nbytes for t in cases.tensors(draw.arguments)]
        self.memory = torch.full((sum(n + 128 for n in sizes) + 64,), BESIDE, dtype=torch.uint8)
        self.memory = self.memory[-self.memory.data_ptr() % 64 :]
        self.memory = self.memory[: len(self.memory) // 16 * 16]
        self.end = 0
        placed = cases.map_tensors(self.place, draw.arguments)
        launches = []
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            for change in changed:
                patch.setattr(*change)
            patch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
            operator.find("cuda").function(**placed)
        ((self.plan, self.tensors),) = launches

    def place(self, t: torch.Tensor) -> torch.Tensor:
        """A copy in ``memory`` that is as far from a multiple of 16 bytes as the tensor is."""
        begin = -(-self.end // 16) * 16 + 32 + t.data_ptr() % 16
        self.end = begin + t.nbytes
        self.places.append((begin, self.end))
        there = self.memory[begin : self.end].view(t.dtype) if t.numel() else t.clone()
        return there.as_strided(t.shape, t.stride()).copy_(t) if t.numel() else there

    @property
    def launch(self) -> str:
        pointers = ", ".join(f"job.buffer({i})" for i in BUFFERS[2 : len(self.tensors)])
        return LAUNCH.replace("KERNEL", self.plan.expression).replace("POINTERS", pointers)

    def job(self) -> bytes:
        buffers = {i: bytes_of(t.clone()) for i, t in zip(BUFFERS, self.tensors, strict=False)}
        buffers |= {4: self.memory.numpy().tobytes(), 10: bytes(8)}  # so that all blocks run together
        shape = (self.memory.data_ptr(), len(self.tensors[1]), *(s.value for s in self.plan.scalars))
        return job(self.plan, self.seed, buffers, shape=shape)

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what the operator does not allow."""
        memory = torch.frombuffer(bytearray(found[: len(self.memory)]), dtype=torch.uint8)
        if any(found[len(self.memory) : -8]):
            return "arrivals are counted on"
        beside = torch.ones(len(memory), dtype=torch.bool)
        for begin, end in self.places:
            beside[begin:end] = False
        if bool((memory[beside] != BESIDE).any()):
            return "written beside a tensor"

        def step(**arguments) -> None:
            for t, (begin, end) in zip(cases.tensors(arguments), self.places, strict=True):
                if t.numel():
                    t.copy_(memory[begin:end].clone().view(t.dtype).as_strided(t.shape, t.stride()))

        return self.draw.judge(step).reason
