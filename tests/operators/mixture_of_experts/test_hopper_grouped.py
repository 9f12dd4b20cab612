"""Grouped products on Hopper's main loop, emulated on a CPU: groups of rows and of terms whose sizes only the kernel reads."""

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

import cuda_as_cpp
import hopper_on_cpu as emulated
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import Suite
from emulated import *  # noqa: F403
from hopper_on_cpu import BF16, FP16, FP32
from sass import assembly, check_inner_loop

from weft.operators.hopper import gemm
from weft.operators.hopper.tensor_maps import encode
from weft.operators.launch import compiling_for
from weft.operators.mixture_of_experts import dispatch

UNEVEN = (70, 0, 1, 200, 64, 0, 129)  # under 64 rows, over 128, as many as a consumer has, none


@dataclass(frozen=True)
class Groups:
    """y[r] = x[r] · w[e]ᵀ of groups of rows, or with ``terms`` c[e] = a_eᵀ · b_e, a [R, m] and b [R, n]. What lies past all
    groups is NaN, and reaches nothing."""

    sizes: tuple[int, ...] = UNEVEN
    past: int = 0
    terms: bool = False
    m: int = 136
    n: int = 136
    k: int = 136
    dtype: torch.dtype = BF16
    layout: str = "NT"  # of x [R, K] and w as [E, K, N]
    columns: int = 64
    stages: int = 3
    cluster: int = 1
    abreast: bool = False
    clusters: int = 3
    gated: bool = False
    biased: bool = False
    padded: bool = False
    offsets: tuple[int, ...] = ()  # those given, where they are not the sizes' own
    amax: bool = False

    @property
    def out(self):
        return self.dtype


class GroupedProduct(emulated.Product):
    def __init__(self, case: Groups, seed: int = 0):
        self.case, self.seed = case, seed
        random = torch.Generator().manual_seed(seed)

        def matrix(*shape: int, across: bool = False) -> torch.Tensor:
            shape = (*shape[:-2], shape[-1], shape[-2]) if across else shape
            made = torch.randn((*shape[:-1], shape[-1] + 16 * case.padded), generator=random).to(case.dtype)
            made = made[..., : shape[-1]]
            return made.mT if across else made

        bounds = (0, *accumulate(case.sizes))
        r, e = bounds[-1] + case.past, len(case.sizes)
        self.bounds = bounds
        self.offsets = torch.tensor(case.offsets or bounds, dtype=torch.int32)
        self.a_scale = self.b_scale = self.amax = self.workspace = torch.zeros(0)
        self.flags = torch.zeros(0, dtype=torch.int32)
        self.bias = torch.zeros(0, dtype=case.dtype)
        config = {"COLUMNS": case.columns, "STAGES": case.stages, "CLUSTER": case.cluster, "ABREAST": int(case.abreast),
                  "GROUP": 2}  # fmt: skip
        if case.terms:
            self.a, self.b = matrix(r, case.m), matrix(r, case.n)
            self.a[bounds[-1] :] = self.b[bounds[-1] :] = torch.nan
            self.up = self.b
            self.c = torch.full((e, case.m, case.n), torch.nan, dtype=case.dtype)
            self.order = torch.tensor(case.sizes).sort(descending=True).indices
            make = lambda: dispatch.hopper_terms(self.a, self.b, e, self.a.device)  # noqa: E731
        else:
            self.a = matrix(r, case.k, across=case.layout[0] == "T")
            self.a[bounds[-1] :] = torch.nan
            self.w = matrix(e, case.n * (2 if case.gated else 1), case.k, across=case.layout[1] == "N")
            self.b, self.up = self.w.chunk(2, 1) if case.gated else (self.w, self.w)
            self.c = torch.full((r, case.n), torch.nan, dtype=case.dtype)
            if case.biased:
                self.bias = torch.randn((e, self.w.shape[1]), generator=random).to(case.dtype)
            make = lambda: dispatch.hopper_rows(self.a, self.w, case.biased, case.gated)  # noqa: E731
        self.residual = self.c
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch.configuration, "trial", config)
            patch.setattr(dispatch, "multiprocessors", lambda device: case.clusters * case.cluster)
            self.plan = make()

    def scalars(self) -> tuple:
        return self.plan.scalars(self.a, self.b, self.up, self.c)

    def wanted(self) -> torch.Tensor:
        case, wanted = self.case, torch.zeros(self.c.shape, dtype=torch.double)
        for e, (first, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if case.terms:
                wanted[e] = self.a[first:end].double().mT @ self.b[first:end].double()
                continue
            sums = self.a[first:end].double() @ self.w[e].double().mT
            sums += self.bias[e].double() if case.biased else 0
            if case.gated:
                gate, up = sums.chunk(2, -1)
                sums = F.silu(gate) * up
            wanted[first:end] = sums
        return wanted


FORMS = {
    "a block alone": {}, "one on another": {"cluster": 2, "columns": 128, "clusters": 2},
    "abreast": {"cluster": 2, "abreast": True, "clusters": 2},
}  # fmt: skip
CASES = {
    **{f"rows {layout}, {form}": Groups(layout=layout, past=72, **FORMS[form])
       for layout in ("NT", "NN", "TN") for form in FORMS},
    **{f"rows, a gate, {form}": Groups(n=72, gated=True, biased=True, past=3, **{**FORMS[form], "columns": 128})
       for form in FORMS},
    "rows, a bias": Groups(dtype=FP16, biased=True, past=130),
    "rows, wide": Groups(columns=256, n=520, k=72),
    "rows, wide, K apart, abreast": Groups(columns=256, n=520, k=72, layout="NN", cluster=2, abreast=True, gated=False),
    "rows, 192 columns, K apart, one on another": Groups(columns=192, n=392, layout="NN", cluster=2, stages=4),
    "rows, all in one group": Groups((0, 0, 300, 0)),
    "rows of 131 begin anywhere": Groups(n=131, past=3, biased=True),
    "rows of 196 begin anywhere, a gate": Groups(dtype=FP16, n=98, past=3, gated=True, cluster=2, columns=128, clusters=2),
    "rows, none": Groups((0, 0, 0), past=65),
    "rows, one": Groups((1,), n=8, k=8),
    "rows, many small groups": Groups((3, 1, 0, 5) * 12, k=72, n=72, padded=True),
    "rows, more groups than lanes of a warp": Groups((1, 2, 0) * 23, k=8, n=8, clusters=5),
    **{f"terms, {form}": Groups(terms=True, past=9, **FORMS[form]) for form in FORMS},
    "terms, fp16, padded": Groups(terms=True, dtype=FP16, padded=True, columns=128, past=70, clusters=5),
    "terms, wide, abreast": Groups(terms=True, columns=256, n=520, cluster=2, abreast=True),
    "terms, 192 columns, one on another": Groups((100, 0, 3, 68), terms=True, columns=192, n=392, m=264, cluster=2, stages=4),
    "terms, none": Groups((0, 0), past=5, terms=True),
    "terms, one": Groups((1,), terms=True, m=8, n=8),
}  # fmt: skip

ROWS, TERMS = CASES["rows NT, a block alone"], CASES["terms, a block alone"]
WAITS, LETS_GO = "            barrier_wait(&full[place], parity);\n", "            release(place);\n"
BESIDE, BIAS = CASES["rows NT, abreast"], CASES["rows, a bias"]
MISTAKES = {
    "rows of the next group overwritten": (ROWS, "row, min(64, tiles.end - row));", "row, 64);"),
    "a store at negative coordinates": (ROWS, '"r"(row + count), "r"(PAST)', '"r"(row + count - PAST), "r"(0)'),
    "a group's last rows put too low": (ROWS, '"r"(row + count)', '"r"(row + count + 1)'),
    "rows that begin anywhere of the next group": (
        CASES["rows of 131 begin anywhere"], "row + r < (GROUPED == WHOLE ? shape.m : tiles.end)", "true"),
    "a row of the group left out": (ROWS, "row, min(64, tiles.end - row));", "row, min(64, tiles.end - row - 1));"),
    "groups begin where tiles do": (ROWS, "row += tiles.begin;", "row += tiles.begin / 64 * 64;"),
    "another group's rows fetched": (ROWS, "? tiles.begin + row : shape.m;", "? row : shape.m;"),
    "rows past all groups multiplied": (
        ROWS, "row = matrix < shape.matrices ? tiles.begin + row : shape.m;", "row += tiles.begin;"),
    "the next group's matrix": (ROWS, "matrix = e;", "matrix = e + 1;"),
    "one matrix for all": (ROWS, "matrix = e;", "matrix = 0;"),
    "tiles miscounted": (ROWS, "i <= of.groups; i += 32", "i < of.groups; i += 32"),
    "a warp's first groups counted alone": (
        CASES["rows, more groups than lanes of a warp"], "i <= of.groups; i += 32", "i < 32; i += 32"),
    "places of an idle consumer kept": (ROWS, f"{WAITS}{LETS_GO}", WAITS),
    "an idle consumer that waits for nothing": (ROWS, f"{WAITS}{LETS_GO}", LETS_GO),
    "the first group's bias": (BIAS, "all + i64(matrix) *", "all + 0 *"),
    "a bias for rows past all groups": (BIAS, "GROUPED != WHOLE && matrix == shape.matrices;  //", "false;  //"),
    "half of A for one block only": (BESIDE, "fetch_for((1 << CLUSTER) - 1, a + r", "fetch_for(1 << rank, a + r"),
    "the same half of A from both": (BESIDE, "const int r = rank * 64;", "const int r = 0;"),
    "both blocks in one column": (
        BESIDE, "rank_beside = ABREAST ? rank : 0;\n  Schedule", "rank_beside = 0;\n  Schedule"),
    "terms of the next group added": (
        TERMS, "min(DEPTH, tiles.end - tiles.begin - depth), down", "DEPTH, down"),
    "terms at the beginning of a stage": (
        TERMS, "? left - DEPTH : depth", "? DEPTH - left : depth", "? tiles.begin + depth : matrix,",
        "? tiles.begin + depth + left : matrix,"),
    "a term of each stage left out": (
        TERMS, "min(DEPTH, tiles.end - tiles.begin - depth), down", "min(DEPTH - 1, tiles.end - tiles.begin - depth), down"),
    "one group for all": (TERMS, "matrix = int(order[matrix]);", "matrix = int(order[0]);"),
    "a turn taken backwards that is not whole": (
        CASES["terms, fp16, padded"], "if (turn % 2 && first + clusters <= this->count())", "if (turn % 2)"),
    "terms of empty groups": (TERMS, "if (!walk.to) {", "if (!depths) {"),
}  # fmt: skip


LAUNCHED = ("rows NT, a block alone", "terms, a block alone")  # by tests of their own
SUITES = {"gemm.cu": Suite(cuda_as_cpp.whole(gemm.SOURCE), GroupedProduct, CASES, MISTAKES, share=4, always=LAUNCHED)}


@pytest.mark.parametrize(
    "bad", [(0, 300, 70, 40, 464, 464, 464, 464), (5, -9, 3, 900, 2000, 2000, 2000, 2000), (0,) * 8]
)
@pytest.mark.parametrize("terms", [False, True])
def test_offsets_that_do_not_fit_reach_nothing_outside(emulated, bad, terms):
    """Operands and C lie before pages that may not be touched."""
    product = GroupedProduct(dataclasses.replace(TERMS if terms else ROWS, past=0, offsets=bad))
    assert isinstance(emulated("gemm.cu").run(product), bytes)


@pytest.mark.parametrize(("case", "place"), [(TERMS, 0), (ROWS, 3)], ids=["load", "store"])
def test_no_map_begins_before_its_tensor(emulated, case, place):
    """On an H200 that may be an illegal memory access, though every box lies in the tensor."""
    product = GroupedProduct(case)
    of = product.plan.maps[place]
    early = lambda t: encode(t.data_ptr() - of.steps[0], of.dtype, of.sizes, of.steps, of.box)  # noqa: E731
    product.plan.maps = tuple(early if i == place else m for i, m in enumerate(product.plan.maps))
    assert "begins outside of its tensor" in emulated("gemm.cu").run(product)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, n, k", [(16, 2048, 768), (512, 2816, 4096), (2048, 768, 2048), (2048, 2048, 768)])
def test_tiles_fit_shared_memory_and_the_kernel(rows, n, k, gated):
    x = torch.empty(64 * rows, k, dtype=BF16, device="meta")
    w = torch.empty(64, 2 * n if gated else n, k, dtype=BF16, device="meta")
    layout = "NTG" if gated else "NT"
    key = (90, "16-bit", layout, 64, rows, n, k)
    for config in (None, *dispatch.candidates(*key)):
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(dispatch.configuration, "trial", config)
            plans = [dispatch.hopper_rows(x, w, False, gated), dispatch.hopper_terms(x, x, 64, x.device)]
        for plan in plans[: 1 if gated else 2]:
            assert plan.launch.shared_bytes <= 232448 and plan.launch.grid[0] <= 132
            assert plan.launch.grid[0] % plan.launch.cluster == 0
            for of in plan.maps:
                assert max(of.box) <= 256 and of.box[0] * 2 == 128


@pytest.mark.parametrize("x, w, words", [
    ((64, 64, FP32), (2, 64, 64, FP32), "16-bit"),
    ((64, 60, BF16), (2, 64, 60, BF16), "16 bytes"),
    ((64, 0, BF16), (2, 64, 0, BF16), "no terms"),
])  # fmt: skip
def test_what_it_does_not_take_is_declined_in_words(x, w, words):
    x, w = (torch.empty(t[:-1], dtype=t[-1]) for t in (x, w))
    assert words in dispatch.rows_unsupported(x, w, False)


@pytest.mark.parametrize(
    "case, words", [("odd", "16 bytes"), ("turned", "contiguous"), ("empty", "no terms"), ("mixed", "16-bit")]
)
def test_gradients_of_weights_that_it_does_not_take_are_declined_in_words(case, words):
    a = torch.empty(64, 64, dtype=BF16)
    b = {"odd": torch.empty(64, 60, dtype=BF16), "turned": a.t(), "empty": a, "mixed": a.float()}[case]
    assert words in dispatch.terms_unsupported(a[: 0 if case == "empty" else None], b, 2)


@pytest.mark.share(12)
@pytest.mark.parametrize(
    "columns, stages, cluster, abreast", [(256, 4, 1, 0), (256, 4, 2, 0), (256, 4, 2, 1), (128, 6, 2, 1)]
)
@pytest.mark.parametrize("grouped, across", [("ROWS_IN_GROUPS", "false, false"), ("ROWS_IN_GROUPS", "false, true"),
                                             ("TERMS_IN_GROUPS", "true, true")])  # fmt: skip
def test_its_inner_loop_is_products_alone(columns, stages, cluster, abreast, grouped, across):
    gates = ("false", "true") if grouped == "ROWS_IN_GROUPS" and across == "false, false" else ("false",)
    for gated in gates:
        text = assembly(
            f"matmul_hopper<bf16, bf16, {columns}, {stages}, {cluster}, {across}, UNSCALED, false, false, "
            f"{'SILU' if gated == 'true' else 'NONE'}, false, {gated}, false, false, false, false, bf16, {grouped}, "
            f"{'true' if abreast else 'false'}>"
        )
        check_inner_loop(text, f"HGMMA.64x{columns}x16.F32.BF16", 1)
