"""A learner's CUDA kernel on this machine's GPU, in a process of its own: ``python -m weft.learn.cuda_on_gpu FOLDER``.

The folder has ``kernel.cu`` and ``job.npz`` (name, grid, block, dynamic shared bytes, arguments ``arg0`` …); it gets
``done.npz``: the arguments after the last launch and the median time, in microseconds. Each launch has fresh arguments and a
cold cache. A fault of the kernel ends this process with the status ``FAULT`` and CUDA's name for it on standard error.
"""

import ctypes
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 15
CACHE_BYTES = 256 << 20
FAULT = 3  # exit status: the kernel failed, not this program


def main() -> None:
    folder = Path(sys.argv[1])
    job = np.load(folder / "job.npz")
    args = [job[f"arg{n}"] for n in range(sum(key.startswith("arg") for key in job.files))]
    try:
        after, us = run(
            (folder / "kernel.cu").read_bytes(), str(job["name"]), job["grid"], job["block"], int(job["shared"]), args
        )
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if not said.startswith(("CUDA error", "CUDA_ERROR")):
            raise
        print(said, file=sys.stderr)  # noqa: T201
        raise SystemExit(FAULT) from None
    np.savez(folder / "done.npz", us=us, **{f"arg{n}": a for n, a in enumerate(after)})


def run(source: bytes, name: str, grid: Any, block: Any, shared: int, args: list[Any]) -> tuple[list[Any], float]:
    """The arguments after the last launch, and the median microseconds of a launch."""
    import torch
    from cuda.bindings import driver

    def ok(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    fresh = [torch.from_numpy(a.reshape(-1).view(np.uint8)).cuda() if a.ndim else None for a in args]
    work = [None if f is None else torch.empty_like(f) for f in fresh]
    major, minor = torch.cuda.get_device_capability()
    cubin, entry = _cubin(source, name, 10 * major + minor)
    library = ok(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = driver.CUfunction(int(ok(driver.cuLibraryGetKernel(library, entry))))
    values = [
        ctypes.c_void_p(w.data_ptr()) if w is not None else (ctypes.c_char * a.nbytes).from_buffer_copy(a.tobytes())
        for w, a in zip(work, args, strict=True)
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(ROUNDS):
        for w, f in zip(work, fresh, strict=True):
            if w is not None and f is not None:
                w.copy_(f)
        cache.zero_()
        torch.cuda._sleep(200_000)  # the host runs ahead
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        ok(
            driver.cuLaunchKernel(
                kernel, *map(int, grid), *map(int, block), shared, stream, ctypes.addressof(pointers), 0
            )
        )
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    after = [
        a if w is None else w.cpu().numpy().view(a.dtype).reshape(a.shape) for w, a in zip(work, args, strict=True)
    ]
    return after, statistics.median(times)


def _cubin(source: bytes, name: str, sm: int) -> tuple[bytes, bytes]:
    from cuda.bindings import nvrtc

    def ok(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    program = ok(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, None, None))
    ok(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [f"--gpu-architecture=sm_{sm}".encode(), b"--std=c++17", b"-default-device"]
    ok(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin, ok(nvrtc.nvrtcGetLoweredName(program, name.encode()))


if __name__ == "__main__":
    main()
