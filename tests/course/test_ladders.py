"""The ladders of sum, layer_norm, cumsum, spmv and histogram without a GPU: their kernels' PTX is interpreted thread by thread.
Results are the reference's, mistakes are noticed, and what each rung is about shows in what is counted."""

import pytest
import torch

from weft import registry
from weft.course.ladders import cumsum, histogram, layer_norm, spmv
from weft.course.ladders import sum as total
from weft.definition import Declined
from weft.learn import cuda, ptx
from weft.operators.cuda import CudaPlan
from weft.operators.sparse.csr import CSR

LADDERS = {"sum": total, "layer_norm": layer_norm, "cumsum": cumsum, "spmv": spmv, "histogram": histogram}
RUNGS = [(name, number) for name, ladder in LADDERS.items() for number in ladder.RUNGS]
FENCED = {("sum", 8), ("cumsum", 7)}  # blocks that order each other by fences and flags: to the interpreter a race


def arguments(name: str, n: int):
    """The sparse matrix has rows of nothing and one row that several blocks share."""
    g = torch.Generator().manual_seed(n)
    x = torch.rand(n, generator=g) if name == "histogram" else torch.randn(n, generator=g)
    if name == "layer_norm":
        return {"x": torch.randn(3, n, generator=g), "weight": x, "bias": torch.randn(n, generator=g)}
    if name != "spmv":
        return {"x": x}
    lengths = torch.randint(0, 7, (90,), generator=g)
    lengths[7], lengths[40:44] = spmv.PIECE + 300, 0
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    columns = torch.randint(0, n, (int(offsets[-1]),), generator=g, dtype=torch.int32)
    return {"matrix": CSR(offsets, columns, torch.randn(len(columns), generator=g), (90, n)), "x": x}


@pytest.fixture
def run(monkeypatch):
    """Runs a rung; gives its result, the counts of its launches, and problems."""
    pytest.importorskip("cuda.bindings")

    def run(name, number, n=1500, edit=("", ""), **arguments_):
        counts, problems = [], []

        def interpreted(plan, *tensors):
            source = plan.source.read_text(encoding="utf-8")
            assert not edit[0] or source.count(edit[0]) == 1
            module, entry = cuda._compiled(source.replace(*edit) if edit[0] else source, plan.expression)
            arrays = [t.numpy() for t in tensors]
            args = [*arrays, *(s.value for s in plan.scalars)]
            names = [str(n) for n in range(len(args))]
            done = ptx.launch(module, entry, plan.grid, (plan.block,), args, names, seed=3, time_limit_s=60)
            counts.append(done.counts)
            problems.extend(problem.en for problem in done.problems)

        monkeypatch.setattr(CudaPlan, "__call__", interpreted)
        return LADDERS[name].rung(number)(**(arguments_ or arguments(name, n))), counts, problems

    return run


def right(name, got, n=1500):
    expected = registry.get(name).reference(**arguments(name, n))
    return got.shape == expected.shape and torch.allclose(got.double(), expected.double(), rtol=1e-5, atol=3e-4)


@pytest.mark.share(3)
@pytest.mark.parametrize(("name", "number"), RUNGS)
def test_a_rung_is_right(run, name, number):
    for n in {"layer_norm": (1500, 4), "spmv": (1500,)}.get(name, (1, 1500)):
        got, _, problems = run(name, number, n)
        assert right(name, got, n)
        assert all((name, number) in FENCED and "race" in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("name", "number", "old", "new"),
    [
        ("sum", 3, "    if (t < s) part[t] += part[t + s];\n    __syncthreads();", "    if (t < s) part[t] += part[t + s];"),
        ("sum", 4, "i + THREADS < n", "i + THREADS <= n"),
        ("sum", 7, "done + first; i < n; i += all", "done + first; i < n - 1; i += all"),
        ("layer_norm", 2, "    __syncthreads();  // the last sum has been read\n", ""),
        ("layer_norm", 4, "delta * delta * count * share", "delta * delta * share"),
        ("layer_norm", 5, "    if (k * THREADS + int(threadIdx.x) < across)\n", ""),
        ("cumsum", 2, "        __syncthreads();\n        part[t] += left;", "        part[t] += left;"),
        ("cumsum", 3, "for (int d = THREADS / 4; d;", "for (int d = THREADS / 8; d;"),
        ("cumsum", 6, "s.before + (blockIdx.x ? sums[blockIdx.x - 1] : 0.f)", "s.before"),
        ("spmv", 4, "    else atomicAdd(y + row, sum);", "    else y[row] = sum;"),
        ("spmv", 5, "const int from = max(offsets[row], begin)", "const int from = offsets[row]"),
        ("histogram", 4, "threadIdx.x / 32 * BINS : bins;", "threadIdx.x / 64 * BINS : bins;\n  if (RUNG == 4) mine[0]++;"),
        ("histogram", 5, "(c + threadIdx.x) % 32", "(c + threadIdx.x) % 31"),
    ],
)  # fmt: skip
def test_a_mistake_is_noticed(run, name, number, old, new):
    got, _, problems = run(name, number, edit=(old, new))
    assert not right(name, got) or (problems and (name, number) not in FENCED)


@pytest.mark.share(2)
def test_counters_move_as_the_rungs_say(run):
    def counted(name, n):
        """Each counter, of each rung; and how many launches."""
        every = [run(name, number, n)[1] for number in LADDERS[name].RUNGS]
        keys = ("issued", "conflicts", "barriers", "sectors_read", "bytes_read", "bytes_written", "atomics_global")
        found = {key: [sum(getattr(c, key) for c in of) for of in every] for key in keys}
        return found | {"launches": [len(of) for of in every]}

    c = counted("sum", 4096)
    assert c["issued"][0] > 1.3 * c["issued"][1] and c["conflicts"][1] > 0 and not any(c["conflicts"][2:])
    assert c["barriers"][3] < 0.6 * c["barriers"][2] and c["barriers"][4] < 0.5 * c["barriers"][3]
    assert c["launches"][-1] == 1 == min(c["launches"])

    c, row = counted("layer_norm", 512), 512 // 8  # sectors; weight and bias are read once a row too
    assert c["sectors_read"][1:] == [3 * k * row for k in (5, 5, 4, 3)] and c["sectors_read"][0] > 4 * 3 * 5 * row
    assert c["barriers"][1] > 3 * c["barriers"][2]

    c = counted("cumsum", 2**12)
    moved = [(read + written) / 2**14 for read, written in zip(c["bytes_read"], c["bytes_written"], strict=True)]
    assert moved[0] > 23 and 4 <= moved[3] < 5.1 and 3 <= moved[5] < 3.3 and 2 <= moved[6] < 2.1
    assert c["conflicts"][2] > 0 and not c["conflicts"][1]

    c = counted("spmv", 1500)
    assert c["sectors_read"][0] > 2 * c["sectors_read"][1] > 0

    c = counted("histogram", 1024)
    assert c["atomics_global"][0] == 1024 and all(a <= 256 for a in c["atomics_global"][1:])
    assert c["conflicts"][1] > 0 == c["conflicts"][4]


@pytest.mark.parametrize(
    "edit",
    [
        ("", ""),
        ("if (running) break;", "break;"),
        ("(1u << lane) - 1", "1u << lane"),
        ("before_tile + before_warp", "before_tile"),
    ],
)
def test_a_tile_looks_back_over_those_that_have_published_their_sums_alone(run, monkeypatch, edit):
    """The interpreter runs blocks one after another, so states are set by hand: of 40 tiles the first has its running sum."""
    size, tiles = cumsum.THREADS * 4 * cumsum.VECTORS, 41
    x = torch.randn(size * tiles, generator=torch.Generator().manual_seed(0))
    sums = x.view(tiles, size).sum(1)
    flags = torch.where(torch.arange(tiles) > 0, 1, 2)
    state = torch.cat([flags << 32 | sums.view(torch.int32).long() & 0xFFFFFFFF, torch.tensor([tiles - 1])])
    y = torch.zeros_like(x)
    monkeypatch.setattr(cumsum, "_look_back", lambda x, _: one_tile(x))

    def one_tile(x):
        cumsum._plan(f"ladder_look_back<{cumsum.VECTORS}>", 1, x.numel())(x, y, state, state[tiles:])
        return y

    run("cumsum", 7, edit=edit, x=x)
    last = slice(size * (tiles - 1), None)
    same = torch.allclose(y[last].double(), x.double().cumsum(0)[last], rtol=1e-5, atol=1e-3)
    assert same == (not edit[0])


def test_rungs_take_lanes_by_the_mean_length_of_rows():
    kernels = [spmv._plan(3, 100, stored).expression for stored in (10, 399, 1600, 10**5)]
    assert kernels == [f"ladder_lanes<{lanes}>" for lanes in (2, 2, 16, 32)]


@pytest.mark.parametrize(
    ("name", "number", "arguments_", "words"),
    [
        ("sum", 1, {"x": torch.ones(4, 4), "dim": 0}, "everything"),
        ("sum", 7, {"x": torch.ones(9)[1:]}, "16 bytes"),
        ("sum", 3, {"x": torch.ones(4).half()}, "fp32"),
        ("layer_norm", 1, {"x": torch.ones(2, 4)}, "weight and a bias"),
        ("layer_norm", 5, {"x": torch.ones(2, 6), "weight": torch.ones(6), "bias": torch.ones(6)}, "16 bytes"),
        ("layer_norm", 5, {"x": torch.ones(1, 8196), "weight": torch.ones(8196), "bias": torch.ones(8196)}, "8192"),
        ("cumsum", 2, {"x": torch.ones(2, 4)}, "one contiguous row"),
        ("cumsum", 7, {"x": torch.ones(4), "reverse": True}, "at the front"),
        ("histogram", 1, {"x": torch.ones(8)[::2]}, "contiguous"),
        ("histogram", 3, {"x": torch.ones(9)[1:]}, "16 bytes"),
    ],
)
def test_rungs_decline_what_they_leave_out(name, number, arguments_, words):
    with pytest.raises(Declined, match=words):
        LADDERS[name].rung(number)(**arguments_)


@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_stands_in_the_registry_in_order(name):
    made = [i for i in registry.get(name).implementations.values() if i.rung is not None]
    assert [i.rung for i in made] == list(LADDERS[name].RUNGS) == list(range(1, len(made) + 1))
    assert all(i.idea and i.directions == ("forward",) and i.dtypes == ("fp32",) for i in made)
    assert registry.get(name).cases("ladder")
