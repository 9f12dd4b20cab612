"""How weft launches CUDA C++: a source file compiled through NVRTC, launched through the driver.

Neither needs a toolkit: NVRTC comes with PyTorch's CUDA builds (or the wheel ``nvidia-cuda-nvrtc``). Sources include headers
that lie beside them, beside this file or in ``hopper/`` and nothing else, so no CUDA headers are needed. What was compiled is
kept on disk for other processes (``weft.disk_cache``). As for Triton, the same plan launches, or compiles only.
"""

import ctypes
import dataclasses
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft import disk_cache
from weft.definition import SHARED_LIMIT, Declined
from weft.operators.launch import PLAIN, compile_request, multiprocessors, target_sm

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CTYPES = {torch.float32: "float", torch.float16: "fp16", torch.bfloat16: "bf16"}  # the names in prelude.cuh


class CudaError(RuntimeError):
    """A compilation or driver call that failed, with the compiler's log or the driver's name for it."""


@functools.cache
def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise ModuleNotFoundError(
            "weft's CUDA C++ kernels need cuda-bindings: pip install 'weft[gpu,nvrtc]'", name="cuda"
        ) from error
    return driver, nvrtc


def _ok(result: tuple[Any, ...], what: str) -> Any:
    code, *values = result
    if int(code):
        raise CudaError(f"{what}: {code.name}")
    return values[0] if len(values) == 1 else values


_of_thread = threading.local()
_launching = threading.Lock()


def driver() -> Any:
    """The driver's functions. A thread's first call makes the device's primary context current where there is none: autograd's
    threads begin without one, and a call of the driver may be all that they ever do. Raises CudaError with what the driver
    says."""
    try:
        return _of_thread.driver
    except AttributeError:
        found = _bindings()[0]
    if torch.cuda.is_available():
        device = torch.cuda.current_device()  # begins CUDA where nothing has
        if not int(_ok(found.cuCtxGetCurrent(), "the thread's CUDA context")):
            context = _ok(found.cuDevicePrimaryCtxRetain(device), "the device's CUDA context")
            _ok(found.cuCtxSetCurrent(context), "giving a thread its CUDA context")
    _of_thread.driver = found
    return found


@functools.cache
def compile_cubin(source: Path, expression: str, sm: int) -> tuple[bytes, str]:
    """The cubin of one kernel of a ``.cu`` file and the kernel's name in it, compiled or found where it was kept; no GPU is
    needed. Raises CudaError with NVRTC's log.

    Args:
        expression: the kernel's C++ name with template arguments, ``softmax_cluster<bf16, 512, 32, true>``.
        sm: architecture, such as 90.
    """
    _, nvrtc = _bindings()
    files = [source, *sorted(_headers(source))]
    names, texts = [f.name.encode() for f in files], [f.read_bytes() for f in files]
    target = f"sm_{sm}a" if sm in (90, 100, 120) else f"sm_{sm}"
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17", b"--extra-device-vectorization"]
    version = repr(_ok(nvrtc.nvrtcVersion(), "NVRTC")).encode()
    digest = hashlib.sha256()
    for part in (version, expression.encode(), *options, *names, *texts):
        digest.update(len(part).to_bytes(8, "big") + part)
    kept = disk_cache.folder("cubins") / f"{source.stem}-{digest.hexdigest()[:32]}"
    if (found := disk_cache.read(kept)) is None:
        found = b"\n".join(_compiled(source, names, texts, expression, target, options))
        disk_cache.write(kept, found)
    name, cubin = found.split(b"\n", 1)
    return cubin, name.decode()


def _headers(source: Path) -> set[Path]:
    """The headers that a file includes, directly or not: beside it, beside this module or in ``hopper/``."""
    found: set[Path] = set()
    unread = [source]
    while unread:
        path = unread.pop()
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            folders = (path.parent, Path(__file__).parent, Path(__file__).parent / "hopper")
            header = next((f / name for f in folders if (f / name).is_file()), None)
            if header is not None and header not in found:
                found.add(header)
                unread.append(header)
    return found


def _compiled(
    source: Path, names: list[bytes], texts: list[bytes], expression: str, target: str, options: list[bytes]
) -> tuple[bytes, bytes]:
    """The kernel's name and its cubin. ``names`` and ``texts`` are the source's, then its headers'."""
    _, nvrtc = _bindings()
    program = _ok(nvrtc.nvrtcCreateProgram(texts[0], names[0], len(names) - 1, texts[1:], names[1:]), "NVRTC")
    try:
        _ok(nvrtc.nvrtcAddNameExpression(program, expression.encode()), "NVRTC")
        if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
            log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{source.name} does not compile for {target}:\n{log.decode(errors='replace')}")
        name = _ok(nvrtc.nvrtcGetLoweredName(program, expression.encode()), "NVRTC")
        cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program), "NVRTC")
        _ok(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC")
        return name, cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _load(source: Path, expression: str, sm: int, shared_bytes: int, cluster: int, device: int) -> Any:
    """The kernel's handle, with its limits raised for much shared memory or a cluster over 8."""
    cuda = driver()
    cubin, name = compile_cubin(source, expression, sm)
    library = _ok(cuda.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"loading {source.name}")
    kernel = _ok(cuda.cuLibraryGetKernel(library, name.encode()), f"finding {expression}")
    attributes = cuda.CUfunction_attribute
    if shared_bytes > 32 * 1024:  # the default limit is 48 KiB with what the kernel declares itself
        wanted = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ok(cuda.cuKernelSetAttribute(wanted, shared_bytes, kernel, device), "raising the shared-memory limit")
    if cluster > 8:
        wanted = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        _ok(cuda.cuKernelSetAttribute(wanted, 1, kernel, device), "allowing a cluster over 8 blocks")
    return cuda.CUfunction(int(kernel))


def flags(*values: Any) -> str:
    """Booleans as template arguments."""
    return ", ".join(str(bool(value)).lower() for value in values)


@dataclass
class CudaPlan:
    """A CUDA C++ kernel with everything but its tensors decided; call it with the tensors, which come first."""

    source: Path  # the ``.cu`` file
    expression: str  # the kernel's name with template arguments
    grid: tuple[int, int]  # blocks (x, y)
    block: int  # threads
    scalars: Sequence[Any] = ()  # ``ctypes`` values, in the order of the kernel's parameters after the pointers
    cluster: int = 1  # blocks (x) that share their shared memory
    shared_bytes: int = 0  # dynamic shared memory
    early: bool = False  # launched for an early start (launch.py), which the kernel is made for
    _ready: Any = field(default=None, repr=False)
    _of_addresses: dict[Any, "CudaPlan"] = field(default_factory=dict, init=False, repr=False)

    def at(
        self, scalars: Callable[..., Sequence[Any]], *tensors: torch.Tensor, factors: tuple[float, ...] = ()
    ) -> "CudaPlan":
        """This launch with ``scalars(*tensors, *factors)``, which hold the tensors' addresses, as tensor maps do; made once for
        each combination."""
        key = (*[t.data_ptr() for t in tensors], *factors)
        if (found := self._of_addresses.get(key)) is None:
            if len(self._of_addresses) >= 256:
                self._of_addresses.clear()
            found = self._of_addresses[key] = dataclasses.replace(self, scalars=scalars(*tensors, *factors))
        return found

    def __call__(self, *tensors: torch.Tensor) -> None:
        if request := compile_request():
            cubin, name = compile_cubin(self.source, self.expression, request.sm)
            request.sink(name, cubin, self.shared_bytes, self.block, "cuda")
            return
        if tensors[0].is_meta or 0 in self.grid:
            return
        cuda = driver()
        if self._ready is None:
            self._ready = self._prepare(tensors[0].device)
        config, kernel = self._ready
        values = [*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *self.scalars]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        with _launching:  # threads share config, and each has its stream
            config.hStream = torch._C._cuda_getCurrentRawStream(tensors[0].get_device())
            result = cuda.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0)
        _ok(result, f"launching {self.expression}")

    def _prepare(self, device: torch.device) -> tuple[Any, Any]:
        cuda = driver()
        index = device.index or 0
        kernel = _load(self.source, self.expression, target_sm(device), self.shared_bytes, self.cluster, index)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *self.grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.shared_bytes
        attributes = []
        if self.cluster > 1:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = self.cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        if self.early:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config, kernel


def pointer_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all tensors start on 16 bytes (tensors without memory, as in tracing, count as aligned)."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return all(t.is_meta or t.__class__ not in PLAIN or t.data_ptr() % 16 == 0 for t in tensors)


# ---- how many clusters or blocks of a kernel a device runs at once, and how much shared memory a block may have ---------


def shared_limit(sm: int) -> int:
    """Bytes of shared memory that one block may have."""
    return SHARED_LIMIT[max(a for a in SHARED_LIMIT if a <= sm)]


def active_clusters(plan: CudaPlan, device: torch.device) -> int:
    """Clusters (blocks, for a plan without clusters) that run at the same time, 0 where not even one fits; estimated where
    there is no device to ask."""
    if compile_request() or device.type != "cuda" or not torch.cuda.is_available():
        return max(1, multiprocessors(device) // plan.cluster)
    config, kernel = plan._prepare(device)
    if plan.cluster > 1:
        code, count = driver().cuOccupancyMaxActiveClusters(kernel, config)
    else:
        code, count = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, plan.block, plan.shared_bytes)
        count *= multiprocessors(device)
    if int(code):
        raise CudaError(f"counting clusters of {plan.expression}: {code.name}")
    return int(count)


def not_resident(plan: CudaPlan, device: torch.device) -> str:
    """Why no cluster runs ("" where one does)."""
    return "" if active_clusters(plan, device) else f"no cluster of {plan.cluster} blocks fits on this device"


def resident(plan: CudaPlan, device: torch.device) -> int:
    """How many run at the same time; raises Declined where none fits."""
    if reason := not_resident(plan, device):
        raise Declined(reason)
    return active_clusters(plan, device)
