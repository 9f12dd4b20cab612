"""The door to CUDA C++: which headers a source finds, and that no thread calls the driver without a CUDA context."""

import enum
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from where import ROOT

pytest.importorskip("cuda.bindings")

from weft.operators import cuda
from weft.operators.hopper import tensor_maps
from weft.operators.transpose.dispatch import FORWARD as TRANSPOSE

KERNEL = '#include "rows.cuh"\n#include "stages.cuh"\n__global__ void kernel(u32 *x) { x[0] = STAGES + PLACES; }\n'


def test_headers_lie_beside_a_source_or_beside_the_door(tmp_path):
    (tmp_path / "kernel.cu").write_text(KERNEL)
    (tmp_path / "stages.cuh").write_text('#pragma once\n#include "rows.cuh"\nconstexpr int STAGES = 3;\n')
    (tmp_path / "rows.cuh").write_text('#pragma once\n#include "prelude.cuh"\nconstexpr int PLACES = 4;\n')
    cubin, name = cuda.compile_cubin(tmp_path / "kernel.cu", "kernel", 90)
    assert cubin[:4] == b"\x7fELF" and "kernel" in name


def test_a_header_that_is_nowhere_is_named(tmp_path):
    (tmp_path / "kernel.cu").write_text(KERNEL)
    with pytest.raises(cuda.CudaError, match=r"kernel\.cu does not compile[^$]*stages\.cuh"):
        cuda.compile_cubin(tmp_path / "kernel.cu", "kernel", 90)


def test_the_same_source_beside_another_header_is_another_kernel(tmp_path):
    for places in (4, 5):
        folder = tmp_path / str(places)
        folder.mkdir()
        (folder / "kernel.cu").write_text(KERNEL)
        (folder / "stages.cuh").write_text("constexpr int STAGES = 3;\n")
        (folder / "rows.cuh").write_text(f'#include "prelude.cuh"\nconstexpr int PLACES = {places};\n')
    four, five = (cuda.compile_cubin(tmp_path / p / "kernel.cu", "kernel", 90)[0] for p in "45")
    assert four != five


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel's arguments for ``compile_cubin``, and a folder for what is kept; each call is as a new process makes it."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "kernel.cu").write_text('extern "C" __global__ void kernel(int *x) { x[0] = 1; }\n')

    def compile_again():
        cuda.compile_cubin.cache_clear()
        return cuda.compile_cubin(tmp_path / "kernel.cu", "kernel", 90)

    return compile_again


def test_another_process_finds_what_was_compiled(kernel, monkeypatch):
    first = kernel()
    monkeypatch.setattr(cuda, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert kernel() == first


def test_what_is_kept_is_of_one_source_and_architecture(kernel, tmp_path):
    first, _ = kernel()
    assert cuda.compile_cubin(tmp_path / "kernel.cu", "kernel", 80)[0] != first
    (tmp_path / "kernel.cu").write_text('extern "C" __global__ void kernel(int *x) { x[0] = 2; }\n')
    assert kernel()[0] != first


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-9], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_what_is_damaged_is_compiled_again(kernel, tmp_path, damage):
    first = kernel()
    (kept,) = (tmp_path / "cache" / "cubins").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert kernel() == first and kept.read_bytes() == whole


def test_where_nothing_can_be_kept_kernels_compile(kernel, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert kernel()[0][:4] == b"\x7fELF"


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """A driver that knows each thread's context, and fails what needs one where there is none."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = threading.local()
        self.fails = ""

    def _done(self, name: str, *values: object) -> tuple:
        self.calls.append(name)
        return (Result.CUDA_ERROR_OUT_OF_MEMORY if name == self.fails else Result.CUDA_SUCCESS, *values)

    def cuCtxGetCurrent(self) -> tuple:
        return self._done("get", getattr(self.current, "context", 0))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple:
        return self._done("retain", 100 + device)

    def cuCtxSetCurrent(self, context: int) -> tuple:
        self.current.context = context
        return self._done("set")

    def cuLaunchKernelEx(self, config, kernel, pointers, extra) -> tuple:
        return self._done(f"launch in {getattr(self.current, 'context', 0)}")


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda, "_bindings", lambda: (made, None))
    monkeypatch.setattr(cuda, "_of_thread", threading.local())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return made


def in_a_thread(work) -> list:
    """What a new thread's work returned, or raised."""
    found: list = []

    def caught() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    return found


def launch(times: int = 1) -> None:
    plan = cuda.CudaPlan(Path("kernel.cu"), "kernel", (1, 1), 32, _ready=(SimpleNamespace(), None))
    for _ in range(times):
        plan(torch.zeros(1))


def test_a_thread_without_a_context_gets_the_devices_before_its_first_launch(driver):
    assert in_a_thread(lambda: launch(3)) == [None]
    assert driver.calls == ["get", "retain", "set", *["launch in 103"] * 3]
    driver.calls.clear()
    assert in_a_thread(launch) == [None]
    assert driver.calls == ["get", "retain", "set", "launch in 103"], "another thread has none either"


def test_a_thread_keeps_the_context_that_it_has(driver):
    def work() -> None:
        driver.current.context = 7
        launch(2)

    assert in_a_thread(work) == [None] and driver.calls == ["get", "launch in 7", "launch in 7"]


@pytest.mark.parametrize("fails", ["get", "retain", "set"])
def test_a_thread_that_gets_no_context_says_so_and_asks_again(driver, fails):
    def work() -> str:
        driver.fails = fails
        with pytest.raises(cuda.CudaError, match="CUDA context: CUDA_ERROR_OUT_OF_MEMORY"):
            launch()
        driver.fails, driver.current.context = "", 0
        launch()
        return driver.calls[-1]

    assert in_a_thread(work) == ["launch in 103"]


def test_all_calls_of_the_driver_pass_the_door():
    folder = ROOT / "src/weft/operators"
    found = [p for p in folder.rglob("*.py") if re.search(r"\b_bindings|cuda\.bindings", p.read_text(encoding="utf-8"))]
    assert found == [folder / "cuda.py"]


@pytest.mark.gpu
def test_a_thread_may_do_nothing_else_with_cuda():
    x = torch.randn(256, 512, device="cuda")
    y = torch.empty(512, 256, device="cuda")
    torch.cuda.synchronize()
    plan = TRANSPOSE.kernel("cuda").of((x,))
    assert in_a_thread(lambda: plan(x, y)) == [None] and torch.equal(y, x.t())
    maps = tensor_maps.Maps(x, False, (32, 64))
    (made,) = in_a_thread(lambda: maps(x))
    assert isinstance(made, tensor_maps.TensorMap)
