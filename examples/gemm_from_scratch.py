"""A matrix product with nothing between: memory, copies, launch and times through CUDA's driver, no PyTorch tensor anywhere.

    python examples/gemm_from_scratch.py [SIZE]

One rung of matmul's ladder, C = A·B in bf16, twice: with memory of the device that is copied to and from (cudaMalloc and
cudaMemcpy, in the driver's words cuMemAlloc and cuMemcpy), and with managed memory, whose pages move when they are touched.
"""

import ctypes
import sys

import numpy as np

from weft.course.ladders.matmul import KERNELS, SOURCE
from weft.operators.cuda import compile_cubin

try:
    from cuda.bindings import driver
except ImportError:
    sys.exit("gemm_from_scratch: needs cuda-bindings: pip install 'weft[gpu,nvrtc]'")

RUNG, STAGE_BYTES = KERNELS[8], 32 * 1024  # tensor cores by mma.sync: from sm_80 on


def done(result):
    """What a driver call returns, after its status."""
    status, *values = result
    if int(status):
        sys.exit(f"gemm_from_scratch: the driver says {status.name}")
    return values[0] if len(values) == 1 else values


def timed_ms(work) -> float:
    """Milliseconds that the device spends between two events on the default stream."""
    start, end = done(driver.cuEventCreate(0)), done(driver.cuEventCreate(0))
    done(driver.cuEventRecord(start, 0))
    work()
    done(driver.cuEventRecord(end, 0))
    done(driver.cuEventSynchronize(end))
    return done(driver.cuEventElapsedTime(start, end))


def load(device: int):
    """The rung's kernel for this device, allowed the shared memory that its stages need."""
    attribute = driver.CUdevice_attribute
    major = done(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = done(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    if major < 8:
        sys.exit(f"gemm_from_scratch: rung 8 needs sm_80, this GPU is sm_{major}{minor}")
    cubin, name = compile_cubin(SOURCE, RUNG.expression, major * 10 + minor)
    function = done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(cubin)), name.encode()))
    shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(driver.cuFuncSetAttribute(function, shared, RUNG.stages * STAGE_BYTES))
    return function


def launch(function, a: int, b: int, c: int, n: int) -> None:
    """C = A·B for n × n matrices at three addresses of the device."""
    arguments = [*(ctypes.c_void_p(p) for p in (a, b, c)), *(ctypes.c_int(n) for _ in range(3))]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
    tile_m, tile_n = RUNG.tile
    blocks = -(-n // tile_m) * -(-n // tile_n)
    done(
        driver.cuLaunchKernel(
            function, blocks, 1, 1, RUNG.threads, 1, 1, RUNG.stages * STAGE_BYTES, 0, ctypes.addressof(pointers), 0
        )
    )


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bf16, as its 16 bits: NumPy has no such type."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    if n < 8 or n % 8:
        sys.exit(f"gemm_from_scratch: SIZE is {n}; expected a multiple of 8")
    try:
        done(driver.cuInit(0))
        count = done(driver.cuDeviceGetCount())
    except RuntimeError:  # cuda-bindings finds no driver
        count = 0
    if not count:
        sys.exit("gemm_from_scratch: there is no GPU here, or no driver for it (weft doctor says which)")
    device = done(driver.cuDeviceGet(0))
    done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(device))))
    function = load(device)

    rng = np.random.default_rng(0)
    a, b = to_bf16(rng.standard_normal((n, n))), to_bf16(rng.standard_normal((n, n)))
    c = np.zeros((n, n), np.uint16)
    size = a.nbytes
    free, _ = done(driver.cuMemGetInfo())
    if 3 * size > free // 2:
        sys.exit(
            f"gemm_from_scratch: three matrices of {size >> 20} MiB; {free >> 20} MiB are free, of which half is taken"
        )

    # ---- memory of the device, copied to and from

    on_device = [done(driver.cuMemAlloc(size)) for _ in range(3)]
    first, second, third = (int(p) for p in on_device)
    there = timed_ms(
        lambda: (
            done(driver.cuMemcpyHtoD(first, a.ctypes.data, size)),
            done(driver.cuMemcpyHtoD(second, b.ctypes.data, size)),
        )
    )
    launch(function, first, second, third, n)  # the first launch loads the code
    product = timed_ms(lambda: launch(function, first, second, third, n))
    back = timed_ms(lambda: done(driver.cuMemcpyDtoH(c.ctypes.data, third, size)))
    for p in on_device:
        done(driver.cuMemFree(p))
    rows = slice(0, n, max(1, n // 16))
    want = from_bf16(a[rows]).astype(np.float64) @ from_bf16(b).astype(np.float64)
    error = float(np.abs(from_bf16(c[rows]) - want).max() / np.sqrt((want**2).mean()))
    print(
        f"copied:  in {there:.3f} ms, product {product:.3f} ms ({2e-9 * n**3 / product:.1f} TFLOP/s), out {back:.3f} ms"
    )
    print(f"         largest error {error:.4f} of the root mean square: {'right' if error < 0.03 else 'WRONG'}")

    # ---- managed memory: one address for host and device; pages move when they are touched

    attached = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    managed = [done(driver.cuMemAllocManaged(size, int(attached))) for _ in range(3)]
    first, second, third = (int(p) for p in managed)
    ctypes.memmove(first, a.ctypes.data, size)  # written by the host, where the pages now are
    ctypes.memmove(second, b.ctypes.data, size)
    faulting = timed_ms(lambda: launch(function, first, second, third, n))  # the device's first touch brings them over
    resident = timed_ms(lambda: launch(function, first, second, third, n))
    same = np.array_equal(np.ctypeslib.as_array((ctypes.c_uint16 * (n * n)).from_address(third)).reshape(n, n), c)
    print(f"managed: product {faulting:.3f} ms with pages on the host, {resident:.3f} ms with pages on the device")
    print(f"         the same result: {'yes' if same else 'NO'}")
    for p in managed:
        done(driver.cuMemFree(p))
    done(driver.cuDevicePrimaryCtxRelease(device))


if __name__ == "__main__":
    main()
