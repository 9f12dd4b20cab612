"""Symmetric products on Hopper's main loop, emulated on a CPU: half of the tiles, mirrored through shared memory."""

import dataclasses
import subprocess
from dataclasses import dataclass

import cuda_as_cpp
import hopper_on_cpu as emulated
import pytest
import torch
from cuda_on_cpu import Suite, compiled
from emulated import *  # noqa: F403
from hopper_on_cpu import BF16, FP16, Case
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import assembly, check_inner_loop

from weft.definition import Declined
from weft.operators.hopper import gemm, tile_sizes


@dataclass(frozen=True)
class Symmetric(Case):
    """What is on and below the diagonal of a product, [m, k] by [k, m], decides all of it; nothing else of A, B, R and S need
    be symmetric, so it shows where an element comes from."""

    n: int = 0
    second: bool = False
    added: torch.dtype | None = None  # dtype of the residuals; None: that of C
    own: bool = False  # whether B is A's mirror image, as in a Gram matrix


class SymmetricProduct(emulated.Product):
    def __init__(self, case: Symmetric, seed: int = 0):
        self.case, self.seed = case, seed
        self.random = torch.Generator().manual_seed(seed)
        many, m, k = ((case.matrices,) if case.matrices else ()), case.m, case.k
        self.a = self.matrix(m, k, case.layout[0])
        self.b = self.a.mT if case.own else self.matrix(k, m, case.layout[1])
        added = case.added or case.out
        self.c = torch.full((*many, m, m), torch.nan, dtype=case.out)
        self.residual = self.matrix(m, m, "N", added) if case.residual else self.c
        self.up = self.matrix(m, m, "N", added) if case.second else self.b
        self.a_scale = self.b_scale = self.amax = torch.zeros(0)
        self.bias = torch.zeros(0, dtype=case.out)
        config = {"COLUMNS": case.columns, "STAGES": case.stages, "CLUSTER": case.cluster, "GROUP": 2,
                  "STREAM": int(case.stream)}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_sizes, "LEAST_SHARE", 1)
            patch.setattr(gemm, "multiprocessors", lambda device: case.clusters * case.cluster)
            self.plan = gemm.HopperPlan(
                self.a, self.b, case.out, symmetric=config, residual=self.residual if case.residual else None,
                second=self.up if case.second else None,
            )  # fmt: skip
        assert bool(self.plan.parts) == case.stream
        self.workspace = torch.full(self.plan.parts or (0,), torch.nan)
        self.flags = torch.zeros(2 * self.plan.launch.grid[0] * case.stream, dtype=torch.int32)

    def wanted(self) -> torch.Tensor:
        case = self.case
        sums = self.a.double() @ self.b.double() * (case.alpha if case.residual else 1.0)
        if case.residual:
            sums = sums + case.beta * self.residual.double()
        if case.second:
            sums = sums + case.gamma * self.up.double()
        return sums.tril() + sums.tril(-1).mT

    def what_is_wrong(self, found: bytes) -> str:
        got = self.result(found)
        return super().what_is_wrong(found) or ("" if got.equal(got.mT) else "not symmetric to the bit")


SHAPES = tuple((columns, cluster) for columns in (64, 128, 192, 256) for cluster in (1, 2) if columns >= 64 * cluster)
CASES = {
    **{f"{m} rows, {columns} columns, clusters of {cluster}": Symmetric(columns=columns, cluster=cluster, m=m, k=72)
       for columns, cluster in SHAPES for m in (200, 520)},
    **{f"a batch, {columns} columns, clusters of {cluster}": Symmetric(
        columns=columns, cluster=cluster, matrices=3, m=136, k=136, padded=True) for columns, cluster in SHAPES},
    **{f"a Gram matrix, {layout}": Symmetric(FP16, FP16, layout, own=True, columns=128, m=328) for layout in ("NT", "TN")},
    **{f"{layout}, clusters of 2": Symmetric(layout=layout, columns=128, cluster=2, m=264, k=136)
       for layout in emulated.LAYOUTS},
    "many tiles": Symmetric(columns=64, m=1032, k=8, clusters=5),
    "many tiles, wide": Symmetric(columns=256, m=1160, k=8, clusters=3),
    "one element": Symmetric(m=8, k=8),
    "one tile": Symmetric(columns=256, cluster=2, m=64, k=64, own=True),
    "no terms": Symmetric(k=0, m=136),
    **{f"alpha and beta, {columns} columns, clusters of {cluster}": Symmetric(
        columns=columns, cluster=cluster, m=392, k=72, residual="apart", alpha=0.75, beta=-1.5) for columns, cluster in SHAPES},
    "alpha and beta, a batch": Symmetric(
        FP16, FP16, columns=128, m=200, k=200, matrices=2, padded=True, residual="apart", beta=0.5),
    "two residuals": Symmetric(columns=128, m=328, k=72, residual="apart", second=True, alpha=1.5, beta=-0.5, gamma=0.25),
    "two residuals, a batch, clusters of 2": Symmetric(FP16, FP16, columns=256, cluster=2, m=264, k=72, matrices=2, padded=True,
                                                       residual="apart", second=True, gamma=-2.0),
    "streamed: a wave and a bit": Symmetric(columns=128, m=328, k=328, clusters=5, stream=True),
    "streamed: fewer tiles than blocks": Symmetric(
        FP16, FP16, columns=256, cluster=2, m=264, k=520, clusters=5, stream=True),
    "streamed: a batch, two residuals": Symmetric(
        columns=192, m=200, k=264, matrices=3, clusters=5, stream=True, residual="apart", second=True, alpha=0.5, gamma=-2.0),
    "streamed: tiles above the diagonal": Symmetric(
        columns=128, cluster=2, m=392, k=264, clusters=4, stream=True, residual="apart"),
    "fp16 in, bf16 out": Symmetric(FP16, BF16, m=136, k=72, residual="apart", added=FP16, columns=128),
}  # fmt: skip

SMALL, WIDE = CASES["520 rows, 128 columns, clusters of 1"], CASES["520 rows, 256 columns, clusters of 1"]
ADDED, TWICE = CASES["alpha and beta, 128 columns, clusters of 1"], CASES["two residuals"]
PUT = "if (SYMMETRIC && !diagonal) put(c_map, staged + ATOM, row, column + held * SLAB, matrix);"
MISTAKES = {
    "the mirror image not stored": (SMALL, PUT, ""),
    "the image where the slab is": (SMALL, PUT, PUT.replace("row, column + held * SLAB", "column + held * SLAB, row")),
    "the diagonal stored twice": (SMALL, PUT, PUT.replace(" && !diagonal", "")),
    "the image not turned": (SMALL, "m8n8.x2.trans.shared", "m8n8.x2.shared"),
    "the image turned in matrices of 8 x 8 alone": (
        SMALL, "place_of_c : image, j, eight), upper", "place_of_c : image, eight, j), upper"),
    "the image not swizzled": (SMALL, "(sixteen ^ r) * 16", "sixteen * 16"),
    "the image's place taken while TMA reads it": (
        SMALL, 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place', ""),
    "upper halves of the diagonal kept": (SMALL, "diagonal && j > eight ? image", "false ? image"),
    "images of upper halves on the diagonal": (SMALL, "diagonal && j < eight ? place_of_c", "diagonal ? place_of_c"),
    "the diagonal's own matrices not mirrored": (
        SMALL, "(j % 2 ? lower : upper) = mirrored(j % 2 ? lower : upper, lane, diagonal && j / 2 == warp);", ""),
    "half of the diagonal's own matrices mirrored": (
        SMALL, "(j % 2 ? lower : upper) = mirrored(j % 2 ? lower : upper,", "upper = mirrored(upper,"),
    "all matrices mirrored": (SMALL, "lane, diagonal && j / 2 == warp)", "lane, diagonal)"),
    "the diagonal's own matrices of another lane": (SMALL, "lane % 4 * 2 - lane / 4;", "lane % 4 * 2 - lane / 4 - 1;"),
    "slabs above the diagonal stored": (WIDE, "if (SYMMETRIC && column + held * SLAB > row) continue;", ""),
    "tiles of another triangle": (WIDE, "(P * (r * (r + 1) / 2) + added) / Q", "P * (r * (r + 1) / 2) / Q"),
    "the rest of a group begun in its third row": (SMALL, "row = first + 1; i >=", "row = first + 2; i >="),
    "a row of tiles too far": (SMALL, "while (before(r) > i) r--;", ""),
    "the residual above the diagonal waited for": (dataclasses.replace(WIDE, residual="apart"),
                                                   "if (SYMMETRIC && column > row) return;", ""),
    "the next residual fetched above the diagonal": (ADDED, "column + (held + HELD) * SLAB, matrix);", "column, matrix);"),
    "the second overwritten by another warp": (TWICE, "if constexpr (SECOND) group_barrier(1 + mine);", ""),
    "the second taken from the first": (TWICE, "fetch(staged + ATOM, up_map, column", "fetch(staged + ATOM, r_map, column"),
    "one residual's bytes for two": (TWICE, "ADDED * 64 * PITCH", "HELD * 64 * PITCH"),
    "the second with the first's factor": (TWICE, "factors.gamma * r[0]", "factors.beta * r[0]"),
}  # fmt: skip


SUITES = {"gemm.cu": Suite(cuda_as_cpp.whole(gemm.SOURCE), SymmetricProduct, CASES, MISTAKES, share=4)}


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    """(row, column, matrix) of every tile, for a width, blocks of a cluster, [m, m], matrices and rows of tiles in a group."""
    cases = "\n".join(
        f"if (x[0] == {columns} && x[1] == {height} / 128)"
        f" list(kernels::Triangle<{height}, {columns}>{{"
        f"(x[2] + {height - 1}) / {height}, (x[2] + {columns - 1}) / {columns}, x[3], x[4]}});"
        for columns in (64, 128, 192, 256)
        for height in (128, 256)
    )
    text = f"""#include "ptx_on_cpu.hpp"
    namespace kernels {{ {cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(cuda_as_cpp.whole(gemm.SOURCE)))} }}
    template <typename T> void list(const T &tiles) {{
      for (int i = 0, row, column, matrix; i < tiles.count(); i++)
        tiles.at(i, row, column, matrix), std::printf("%d %d %d\\n", row, column, matrix);
    }}
    int main(int, char **words) {{
      int x[5];
      for (int i = 0; i < 5; i++) x[i] = std::atoi(words[1 + i]);
      {cases}
    }}"""
    program = compiled(tmp_path_factory.mktemp("order"), {"order": text})["order"]

    def run(*numbers: int) -> list[tuple[int, ...]]:
        done = subprocess.run([program, *map(str, numbers)], capture_output=True, text=True, check=True, timeout=60)
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_every_tile_that_touches_the_lower_triangle_is_one_clusters(order, columns, cluster):
    height = 128 * cluster
    for m in (1, 64, 128, 130, 200, 392, 1000, 2048, 4096, 5000):
        rows, each = range(-(-m // height)), range(-(-m // columns))
        wanted = {(r, c) for r in rows for c in each if c * columns < (r + 1) * height}
        for group in (1, 3, 8):
            for matrices in (1, 2):
                found = order(columns, cluster, m, matrices, group)
                assert len(found) == len(set(found)) == tile_sizes.triangle(m, columns, cluster) * matrices
                assert set(found) == {(*tile, z) for tile in wanted for z in range(matrices)}
                assert [z for *_, z in found] == sorted(z for *_, z in found)
                assert [r // group for r, _, z in found if not z] == sorted(r // group for r, _, z in found if not z)


WAYS_OUT = [  # one in four, among which each value of each argument is; make test-all has all
    pytest.param(residuals, streamed, *tile, layout, marks=pytest.mark.long if (i + j + k + m) % 4 else ())
    for i, residuals in enumerate([0, 1, 2])
    for j, streamed in enumerate([False, True])
    for k, tile in enumerate([(256, 4, 2), (192, 4, 2), (128, 6, 1), (64, 8, 1)])
    for m, layout in enumerate(["false, false", "true, true"])
]


@pytest.mark.share(9)
@pytest.mark.parametrize(("residuals", "streamed", "columns", "stages", "cluster", "layout"), WAYS_OUT)
def test_the_way_out_disturbs_no_product(residuals, streamed, columns, stages, cluster, layout):
    types = "bf16, bf16" if residuals < 2 else "fp16, fp16"
    parts = ", ".join(str(p).lower() for p in (residuals > 0, False, False, streamed, True, residuals == 2))
    options = f"{layout}, UNSCALED, false, false, NONE, {parts}"
    text = assembly(f"matmul_hopper<{types}, {columns}, {stages}, {cluster}, {options}>")
    fetches = 2 if layout == "false, false" else 2 + (columns // cluster // 64 if columns != 192 else 3)
    check_inner_loop(text, f"HGMMA.64x{columns}x16.F32" + (".BF16" if types[0] == "b" else ""), fetches, streamed)
    assert "STSM.16.MT88.2" in text and "MOVM.16.MT88" in text


@pytest.mark.parametrize("m, cluster", [(8, 1), (4096, 2)])
def test_shared_memory_holds_a_slab_and_its_image(m, cluster):
    a = torch.empty(m, m, dtype=BF16, device="meta")
    config = {"COLUMNS": 256, "STAGES": 4, "CLUSTER": cluster, "GROUP": 8, "STREAM": 0}
    made = gemm.HopperPlan(a, a.mT, symmetric=config).launch
    assert made.shared_bytes == 4 * (128 + 256) * 128 + 2 * 2 * 64 * 128 + tile_sizes.BARRIERS <= tile_sizes.SHARED
    clusters = min(tile_sizes.triangle(m, 256, cluster), gemm.multiprocessors(a.device) // cluster)
    assert made.grid[0] == clusters * cluster


A = torch.empty(64, 64, dtype=BF16, device="meta")
CONFIG = {"COLUMNS": 128, "STAGES": 4, "CLUSTER": 1, "GROUP": 8, "STREAM": 0}
REFUSED = [
    bad(gemm.HopperPlan, Declined, "symmetric product of 64 × 32", A, A[:, :32], symmetric=CONFIG),
    bad(gemm.HopperPlan, Declined, "with scales, a bias", A, A, symmetric=CONFIG, epilogue=gemm.Epilogue(biased=True)),
    bad(gemm.HopperPlan, Declined, "in torch.float32", A, A, torch.float32, symmetric=CONFIG),
    bad(gemm.HopperPlan, Declined, "a second residual", A, A, residual=A, second=A),
    bad(gemm.HopperPlan, Declined, "a residual", A, A, residual=A, second=A.half(), symmetric=CONFIG),
]
