"""How long a call takes eagerly, compiled, as a CUDA graph, and in ONNX Runtime (with TensorRT where it is installed)."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from weft.export.model import evaluated, packages, quiet
from weft.timing import Timer

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS = {"onnxruntime CUDA": CUDA, "onnxruntime TensorRT": TENSORRT}


def latency(
    module: Any, inputs: Sequence[Any], path: str | os.PathLike[str], *, device: str = "cpu", compiled: bool = True
) -> dict[str, float | str]:
    """Medians in microseconds by runtime, interleaved, or why a runtime could not run.

    Args:
        module: on any device; it is moved to ``device`` and back.
        inputs: the tensors of a call, on the CPU. ONNX Runtime takes them from there: its copies count.
        path: the file that :func:`weft.export.to_onnx` wrote.
        device: ``cpu`` or ``cuda``.
        compiled: also ``torch.compile``, which takes half a minute.
    """
    torch, runtime = packages()
    on_device = [t.to(device) for t in inputs]
    was = next((p.device for p in module.parameters()), torch.device("cpu"))
    calls: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}

    def add(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            call = make()
            call()
            calls[name] = call
        except Exception as error:  # a runtime that cannot run here is a row of the table
            failed[name] = str(error).partition("\n")[0][:80]

    with evaluated(module), torch.no_grad(), quiet():
        try:
            module.to(device)
            add("eager", lambda: lambda: module(*on_device))
            if compiled:
                add("compile", lambda: _bound(torch.compile(module), on_device))
            if device == "cuda":
                add("CUDA graph", lambda: _graph(torch, module, on_device))
            add("onnxruntime CPU", lambda: _session(runtime, path, "CPUExecutionProvider", inputs))
            for name, provider in PROVIDERS.items() if device == "cuda" else ():
                if provider in runtime.get_available_providers():
                    add(name, lambda provider=provider: _session(runtime, path, provider, inputs))  # type: ignore[misc]
            timings = Timer(device, cold=False, budget_s=1.0).measure({name: [call] for name, call in calls.items()})
        finally:
            module.to(was)
    return {**{name: t.median_us for name, t in timings.items()}, **failed}


def _bound(function: Any, inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: function(*inputs)


def _graph(torch: Any, module: Any, inputs: Sequence[Any]) -> Callable[[], Any]:
    for _ in range(3):  # allocations and cuBLAS's workspace, before the capture
        module(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(*inputs)
    return lambda: graph.replay()


def _session(runtime: Any, path: Any, provider: str, inputs: Sequence[Any]) -> Callable[[], Any]:
    options = runtime.SessionOptions()
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # idle threads would slow the other runtimes
    others = [CUDA] if provider == TENSORRT else []  # of nodes that TensorRT does not have
    session = runtime.InferenceSession(str(path), options, providers=[provider, *others])
    if provider not in session.get_providers():  # it falls back to the CPU when a library is missing
        raise RuntimeError(f"{provider} could not be loaded")
    given = dict(zip((i.name for i in session.get_inputs()), (t.numpy() for t in inputs), strict=True))
    return lambda: session.run(None, given)
