"""The door to CUDA C++: which headers a source finds."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from weft.operators import cuda

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
