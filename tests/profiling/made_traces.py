"""Chrome traces as Kineto writes them, made by hand: what the host does and what the device does, with known answers."""

import json
from pathlib import Path
from typing import Any

PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
GEMM, ELEMENTWISE = (
    "ampere_sgemm_128x64_nn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::Add<float> >(int, float)",
)


class MadeTrace:
    """Times are microseconds from ``base``, which is as large as a real trace's."""

    def __init__(self, gpu: str = "NVIDIA Test", base: float = 0.0):
        self.events: list[dict[str, Any]] = []
        self.gpu, self.base, self.ids = gpu, base, 0

    def span(self, cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> None:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 7,
            "tid": tid,
            "ts": self.base + ts,
            "dur": dur,
            "args": args,
        }
        self.events.append(event)

    def step(self, number: int, ts: float, dur: float) -> None:
        self.span("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def op(
        self, name: str, ts: float, dur: float, dims: Any = (), kind: str = "float", tid: int = 1, **args: Any
    ) -> None:
        shapes = [list(d) for d in dims]
        self.span("cpu_op", name, ts, dur, tid, **{"Input Dims": shapes, "Input type": [kind] * len(shapes)}, **args)

    def kernel(
        self, launch: float, ts: float, dur: float, name: str = GEMM, tid: int = 1, stream: int = 7, cpu: float = 5.0
    ) -> None:
        """A kernel at ``ts``, launched at ``launch`` by a call of ``cpu`` µs."""
        self.ids += 1
        self.span("cuda_runtime", "cudaLaunchKernel", launch, cpu, tid, correlation=self.ids)
        self.span("kernel", name, ts, dur, stream, device=0, stream=stream, correlation=self.ids)

    def copy(self, launch: float, ts: float, dur: float, name: str = PAGEABLE, size: int = 1_000_000) -> None:
        self.ids += 1
        self.span("cuda_runtime", "cudaMemcpyAsync", launch, 5.0, correlation=self.ids)
        self.span("gpu_memcpy", name, ts, dur, 7, device=0, stream=7, correlation=self.ids, bytes=size)

    def memory(self, ts: float, size: int, address: int, total: int, kind: int = 1) -> None:
        args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Id": 0, "Device Type": kind}
        self.events.append({"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": self.base + ts, "args": args})

    def data(self) -> dict[str, Any]:
        return {"deviceProperties": [{"id": 0, "name": self.gpu}], "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.data()))
        return path

    def profile(self, ceilings: Any = None) -> Any:
        from weft.profiling import analysis, kineto

        return analysis.analyse(kineto.parse(self.data(), "made.json"), ceilings)
