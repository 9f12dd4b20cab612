"""2:4 semi-structured products on the CPU emulator of Hopper; what they compile to and decline."""

import re
from dataclasses import dataclass

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, Suite, further_off_than_rounding, job, tensor_of
from emulated import *  # noqa: F403
from hopper_on_cpu import packed_maps
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import sass

from weft.definition import Declined
from weft.operators.launch import compiling_for
from weft.operators.sparse import sparse_2_4_matmul, sparse_hopper


@dataclass(frozen=True)
class Case:
    """A product of random matrices: its kernel, its sizes, and how many clusters of blocks there are for all tiles."""

    dtype: torch.dtype = BF16
    layout: str = "T"  # of b [K, N]: T where K is contiguous
    warpgroups: int = 2
    columns: int = 64
    stages: int = 3
    cluster: int = 1
    held: int = 1
    m: int = 200
    n: int = 136
    k: int = 384
    clusters: int = 2
    padded: bool = False  # whether rows of b lie further apart than they are long


SHAPES = ((2, 64, 1), (2, 128, 2), (2, 192, 2), (2, 256, 2), (3, 64, 1), (3, 192, 2), (1, 64, 2), (1, 128, 2))
CASES = {
    **{f"{layout}, {64 * groups} x {columns}, clusters of {cluster}": Case(
        layout=layout, warpgroups=groups, columns=columns, cluster=cluster, held=columns // 64 % 2 or 2, padded=groups == 3)
       for layout in "NT" for groups, columns, cluster in SHAPES},
    **{f"{stages} stages, {layout}": Case(FP16, layout, stages=stages, columns=128, m=392, n=264, k=640)
       for stages in (2, 4, 5) for layout in "NT"},
    "one piece a tile": Case(FP16, m=500, k=128, clusters=3),
    "two pieces a tile, a cluster": Case(layout="N", m=520, k=256, columns=128, cluster=2, held=2),
    "a block with nothing to do": Case(m=100, columns=64, cluster=2),
    "one element": Case(m=1, n=8, k=128),
    "seventeen rows": Case(m=17, n=72, k=256, cluster=1),
}  # fmt: skip

PLAIN, CROWDED = CASES["T, 128 x 64, clusters of 1"], CASES["5 stages, T"]
PAIR = CASES["N, 128 x 128, clusters of 2"]
MISTAKES = {
    "the upper row's places for the lower": (PLAIN, "lane % 2 ? 0x3276 : 0x5410", "lane % 2 ? 0x7632 : 0x5410"),
    "places not exchanged": (PLAIN, "__byte_perm(own, other, lane % 2 ? 0x3276 : 0x5410)", "own"),
    "places of another lane": (PLAIN, "__shfl_xor_sync(0xffffffffu, own, 1)", "__shfl_xor_sync(0xffffffffu, own, 2)"),
    "places of row 8 for those of row 1": (PLAIN, "lane / 4 + lane % 2 * 8,", "lane / 2 % 8 + lane % 2 * 8,"),
    "places of another warp": (PLAIN, "row + 16 * warp + lane / 4 + lane % 2", "row + lane / 4 + lane % 2"),
    "places of both halves from the first": (PLAIN, "+ lane % 4 / 2;", ";"),
    "places of the piece before": (PLAIN, "at[(piece + 2) *", "at[piece *"),
    "half of the next piece's places": (PLAIN, "(piece + 2) * (PIECE / DEPTH)", "piece + 2"),
    "the next tile's places not read": (PLAIN, "if (tile + step < count) begin(tile + step)", "if (tile + step < count) {\n"
                                        "const u64 was = even;\nbegin(tile + step), even = was;\n}"),
    "the second piece's places not read": (PLAIN, "if (pieces > 1) odd", "if (pieces > 3) odd"),
    "places of a piece that is not there": (CASES["one piece a tile"], "if (pieces > 1) odd", "odd"),
    "places past the end": (PLAIN, "if (piece + 2 < pieces) words", "words"),
    "places past the last row": (PLAIN, "min(row + 16 * warp + lane / 4 + lane % 2 * 8, shape.m - 1)",
                                 "(row + 16 * warp + lane / 4 + lane % 2 * 8)"),
    "the other lanes' places": (PLAIN, "multiply<COLUMNS, 0, B_ACROSS>", "multiply<COLUMNS, 1, B_ACROSS>"),
    "the second half's values from the first": (PLAIN, "a + (2 + s) * A_STEP", "a + s * A_STEP"),
    "terms of B in steps of 16": (PLAIN, ": 64) >> 4", ": 32) >> 4"),
    "terms of B in steps of 16, across": (PAIR, "4 * 8 * LINE : 64", "2 * 8 * LINE : 64"),
    "sums not begun anew": (PLAIN, "places[s], piece + s != 0)", "places[s], 1)"),
    "values of the first warpgroup for the second": (PLAIN, "line * A_BYTES) + mine * ATOM, 0)", "line * A_BYTES), 0)"),
    "too few places for values": (CROWDED, "LINES = (STAGES + 2) / 2", "LINES = STAGES / 2"),
    "values not counted": (PLAIN, "B_BYTES + (begins ? A_BYTES : 0)", "B_BYTES"),
    "values of every stage": (PLAIN, "begins = depth % 2 == 0", "begins = true"),
    "values of another line": (PLAIN, "depth * (DEPTH / 2), row", "depth * DEPTH, row"),
    "a place let go while it is read": (PLAIN, "wgmma_wait<1>();", ""),
    "the last place not let go": (PLAIN, "      release(before);\n      const int of_row", "      const int of_row"),
    "the other block's place not waited for": (PAIR, "4 * WARPGROUPS * CLUSTER", "4 * WARPGROUPS",
                                               "if (lane < CLUSTER)", "if (lane < 1)"),
    "a block leaves before the other": (PAIR, "CLUSTER > 1 && s < STAGES", "false && s < STAGES"),
    "the tile that comes next stored": (PLAIN, "of_column + (held + slab) * 64, of_row", "column + (held + slab) * 64, row"),
    "stored before it is written": (PLAIN, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""),
    "a slab overwritten while it is read": (PLAIN, 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', ""),
    "the other half of three boxes": (CASES["N, 128 x 192, clusters of 2"], "(c + deeper) * LINE", "c * LINE"),
    "one box fetched by both blocks": (CASES["N, 64 x 64, clusters of 2"], "depth * DEPTH + deeper", "depth * DEPTH"),
}  # fmt: skip

LAUNCH = """
const Shape shape = {int(job.shape[0]), int(job.shape[1]), int(job.shape[2]), int(job.shape[3]), int(job.shape[4]), 0, 0, 0};
job.run([&] {
  KERNEL(job.buffer(5), job.map<TensorMap>(0), job.map<TensorMap>(1), job.map<TensorMap>(2), shape);
});
"""


class Product:
    """The operands of a case, and its plan, made on a machine with few multiprocessors."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        random = torch.Generator().manual_seed(seed)
        workload = sparse_2_4_matmul.workload("bf16", M=case.m, N=case.n, K=case.k)
        self.a = sparse_2_4_matmul.inputs(workload, random, "cpu")["a"]
        self.values, self.metadata = self.a.values.to(case.dtype), self.a.metadata
        rows, columns = (case.k, case.n) if case.layout == "N" else (case.n, case.k)
        b = torch.randn((rows, columns + 8 * case.padded), generator=random).to(case.dtype)[:, :columns]
        self.b = b if case.layout == "N" else b.mT
        self.c = torch.full((case.m, case.n), torch.nan, dtype=case.dtype)
        config = {"WARPGROUPS": case.warpgroups, "COLUMNS": case.columns, "STAGES": case.stages, "CLUSTER": case.cluster,
                  "HELD": case.held, "GROUP": 2}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_hopper.configuration, "trial", config)
            patch.setattr(sparse_hopper, "multiprocessors", lambda device: case.clusters * case.cluster)
            patch.setattr(sparse_hopper, "target_sm", lambda device: 90)
            self.plan = sparse_hopper.SparseHopperPlan(self.values, self.metadata, self.b)
        self.launch = LAUNCH.replace("KERNEL", self.plan.launch.expression)

    def job(self) -> bytes:
        buffers = {0: self.values, 1: self.b, 4: self.c, 5: self.metadata}
        maps, of = packed_maps(lambda: self.plan.scalars(self.values, self.b, self.c), buffers, (0, 1, 4))
        shape = (of.m, of.n, of.k, of.matrices, of.group)
        return job(self.plan.launch, self.seed, buffers, maps=maps, shape=shape, factors=())

    def what_is_wrong(self, found: bytes) -> str:
        got = tensor_of(found[: self.c.nbytes], self.c.dtype).view(self.c.shape)
        dense = type(self.a)(self.values, self.metadata, self.a.shape).to_dense()
        return further_off_than_rounding("C", got, dense.double() @ self.b.double())


SUITES = {"sparse_hopper.cu": Suite(whole(sparse_hopper.SOURCE), Product, CASES, MISTAKES)}


KERNELS = {
    "2, 256, 4, 2, 2, false": "HGMMA.SP.64x256x32.F32.BF16",
    "2, 256, 4, 2, 2, true": "HGMMA.SP.64x256x32.F32.BF16",
    "3, 192, 4, 2, 1, true": "HGMMA.SP.64x192x32.F32.BF16",
    "2, 128, 6, 1, 2, false": "HGMMA.SP.64x128x32.F32.BF16",
    "1, 64, 8, 1, 1, true": "HGMMA.SP.64x64x32.F32.BF16",
}


@pytest.mark.share(3)
@pytest.mark.parametrize("sizes", KERNELS)
def test_its_inner_loop_is_products_alone(sizes):
    """Stages run in pairs, not one after another; neither sums nor descriptors pass through other registers; and the places of
    one piece are not in registers that products of the piece before may still read."""
    text = sass(sparse_hopper.SOURCE, f"sparse_hopper<bf16, {sizes}>")
    products = re.findall(r"(HGMMA\S+) R\d+, gdesc\[UR\d+\]\S* R\d+, (?:UP0, )?(R\d+), (0x[01])(, gsb0)? ;", text)
    assert len(products) == len(re.findall("GMMA", text)) == 8
    assert {name for name, *_ in products} == {KERNELS[sizes]}
    assert [selector for *_, selector, _ in products] == ["0x0", "0x0", "0x1", "0x1"] * 2
    assert [bool(group) for *_, group in products] == [False, True] * 4, "ptxas makes products wait for each other"
    places = [register for _, register, _, _ in products]
    assert places[:2] == places[2:4] and places[4:6] == places[6:] and len(set(places)) == 4
    inner = text[text.index("HGMMA") : text.rindex("HGMMA")]
    assert "R2UR" not in inner, "descriptors are made in registers of threads"
    assert len(re.findall(r"\bMOV|IMAD\.MOV", inner)) < 8, "sums are moved"
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", text)
    assert waits.count("0x1") == 4 and waits.count("0x0") == 1


def operands(m=128, k=256, n=64, dtype=BF16):
    values = torch.empty(m, k // 2, dtype=dtype, device="meta")
    metadata = torch.empty(m, k // 16, dtype=torch.int16, device="meta")
    return values, metadata, torch.empty(k, n, dtype=dtype, device="meta")


def plan(*given, sm=90):
    with compiling_for(sm, lambda *kernel: None):
        return sparse_hopper.SparseHopperPlan(*given)


@pytest.mark.parametrize(
    "m, n, k", [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 64, 8192), (1, 8, 128), (300, 20000, 640)]
)
def test_the_heuristics_kernels_fit_the_machine(m, n, k):
    made = plan(*operands(m, k, n)).launch
    assert made.shared_bytes <= sparse_hopper.SHARED and made.grid[0] <= 132 and made.grid[0] % made.cluster == 0
    sizes = made.expression.split("<")[1].split(", ")
    assert made.block == 128 + 128 * int(sizes[1])


def test_every_form_has_places_for_values_and_fits():
    forms = list(sparse_hopper.forms())
    assert len(forms) > 20
    for c in forms:
        assert c["STAGES"] >= 2 and sparse_hopper.shared_bytes(c) <= sparse_hopper.SHARED
        assert 16 * c["STAGES"] <= sparse_hopper.BARRIERS


VALUES, METADATA, DENSE = operands()
REFUSED = [
    bad(plan, Declined, "144 columns of a", *operands(k=144)),
    bad(plan, Declined, "0 columns of a", *operands(k=0)),
    bad(plan, Declined, "rows of 60 elements", *operands(n=60)),
    bad(plan, Declined, "torch.float32", *operands(dtype=torch.float32)),
    bad(plan, Declined, "'b' has no contiguous dimension", VALUES, METADATA, DENSE.as_strided((256, 64), (256, 2))),
    bad(plan, Declined, "'b' has rows that do not begin", VALUES, METADATA, DENSE.as_strided((256, 64), (68, 1))),
    bad(plan, Declined, "two of bfloat16", VALUES.half(), METADATA, DENSE),
    bad(plan, Declined, "sm_100", *operands(), sm=100),
]


def test_it_is_chosen_where_it_takes_the_operands(monkeypatch):
    product = Product(Case(k=256))
    monkeypatch.setattr("weft.operators.dispatch.on_gpu", lambda t: True)
    monkeypatch.setattr("weft.operators.dispatch.target_sm", lambda device: 90)
    monkeypatch.setattr(sparse_hopper, "target_sm", lambda device: 90)
    assert not sparse_hopper.why_not(product.values, product.metadata, product.b)
    assert sparse_2_4_matmul.choose(product.a, product.b).implementation == "cuda"
    assert sparse_2_4_matmul.choose(product.a, product.b[:, :0]).implementation != "cuda"
    odd = product.b[:, :12]
    assert sparse_2_4_matmul.choose(product.a, odd).implementation == "cuda-padded"
