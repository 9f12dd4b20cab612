"""Kernels compile for GPUs that are not there, what they need is held against what an architecture has, and only a process
that does not interpret may compile."""

import inspect
import json
import re

import pytest
from where import ROOT, printed, python

from weft import registry
from weft.bench import compile_check
from weft.course.ladders import cumsum
from weft.definition import ARCHITECTURES, SHARED_LIMIT, Cost, Operator, UnknownName, workload
from weft.operators import cuda, launch

NAMED = ("softmax", "triton", "forward", "M=64,N=100", "fp32")


@pytest.fixture(scope="module")
def compiled():
    """``weft compile-check vector_add --json`` from a shell in which the interpreter is switched on."""
    words = ("-m", "weft", "compile-check", "vector_add", "--dtype", "fp32", "--dtype", "bf16", "--json")
    return json.loads(printed(*words, TRITON_INTERPRET="1"))


def test_every_kernel_of_an_operator_compiles_for_every_architecture(compiled):
    assert compiled["failed"] == 0 and compiled["compiled"] == len(compiled["results"]) > 0
    kernels = {"add_flat", "map_two"}
    wanted = {(k, f"sm_{sm}", d) for k in kernels for sm in ARCHITECTURES for d in ("fp32", "bf16")}
    assert {(r["kernel"], r["arch"], r["dtype"]) for r in compiled["results"]} == wanted


@pytest.mark.long
def test_without_a_dtype_all_of_an_operator_are_compiled():
    found = json.loads(printed("-m", "weft", "compile-check", "vector_add", "--arch", "sm_90", "--json"))
    kernels = {(k, d) for k in ("add_flat", "map_two") for d in ("fp32", "fp16", "bf16")}
    assert found["failed"] == 0 and {(r["kernel"], r["dtype"]) for r in found["results"]} == kernels


def test_what_a_kernel_needs_is_reported_against_the_limit(compiled):
    for r in compiled["results"]:
        assert r["ok"] and not r["reason"] and 8 <= r["registers"] <= 255 and r["spills"] == 0
        assert 0 <= r["shared_bytes"] <= r["shared_limit"] == SHARED_LIMIT[int(r["arch"][3:])]


@pytest.mark.share(2)
def test_cuda_and_both_directions_are_compiled():
    """Kernels in CUDA C++ through NVRTC; of the direction ``backward`` the backward kernel, not the forward's again."""
    pytest.importorskip("cuda.bindings")
    one = ("--dtype", "fp32", "--processes", "1")  # kernels have the same names in every dtype
    done = python("-m", "weft", "compile-check", "softmax", "--arch", "sm_90", "--arch", "80", *one, "--json")
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 0 and not [r for r in results if not r["ok"]]
    kernels = {(r["implementation"], r["direction"], r["arch"]): set() for r in results}
    for r in results:
        kernels[r["implementation"], r["direction"], r["arch"]].add(r["kernel"])
    for arch in ("sm_80", "sm_90"):
        assert kernels["triton", "forward", arch] == {"softmax_rows", "softmax_long_rows", "softmax_vectors"}
        backward = {f"softmax_backward_{part}" for part in ("rows", "long_rows", "vectors")}
        assert kernels["triton", "backward", arch] == backward
    assert ("cuda", "forward", "sm_80") not in kernels  # declared for sm_90 and later
    assert all("softmax_cluster" in name for name in kernels["cuda", "forward", "sm_90"])
    assert all("softmax_backward_cluster" in name for name in kernels["cuda", "backward", "sm_90"])
    assert all(("ladder-1-naive", "forward", arch) in kernels for arch in ("sm_80", "sm_90"))


@pytest.mark.parametrize(("usage", "dynamic", "sm", "reason"), [
    ({"REG": 64, "STACK": 0, "SHARED": 0}, 101376, 86, ""),
    ({"REG": 64, "STACK": 0, "SHARED": 0}, 101377, 86, "101377 bytes of shared memory a block; sm_86 has 101376"),
    ({"REG": 64, "STACK": 0, "SHARED": 0}, 200000, 90, ""),
    ({"REG": 64, "STACK": 0, "SHARED": 0}, 200000, 80, "200000 bytes of shared memory a block; sm_80 has 166912"),
    ({"REG": 64, "STACK": 0, "SHARED": 232449}, 0, 90, "232449 bytes of shared memory a block; sm_90 has 232448"),
    ({"REG": 64, "STACK": 0, "SHARED": 0}, 0, 90, ""),
    ({"REG": 65, "STACK": 16, "SHARED": 0}, 0, 90, "65 registers × 1024 threads; a block has 65536"),
])  # fmt: skip
def test_a_kernel_that_does_not_fit_fails(monkeypatch, usage, dynamic, sm, reason):
    monkeypatch.setattr(compile_check, "resource_usage", lambda cubin, kernel: usage)
    found = compile_check._examine(NAMED, "softmax_rows", b"", dynamic, 1024, sm)
    assert (found.ok, found.reason) == (not reason, reason)
    assert (found.registers, found.spills) == (usage["REG"], usage["STACK"])
    assert compile_check.summary([found], 1.0)["failed"] == bool(reason)
    assert compile_check.summary([found], 1.0)["with_spills"] == bool(usage["STACK"])


def test_of_several_kernels_in_a_file_the_launched_one_s_registers_are_reported():
    pytest.importorskip("cuda.bindings")
    cubin, _ = cuda.compile_cubin(cumsum.SOURCE, "ladder_doubling", 90)
    doubling, scan = "_Z15ladder_doublingPKfPfxx", "_Z11ladder_scanPKfS0_Pfx"
    used = [compile_check.resource_usage(cubin, name)["REG"] for name in (doubling, scan)]
    assert used[1] > used[0] > 0


def test_a_kernel_that_does_not_compile_is_a_failure_with_its_reason():
    def raises(**arguments):
        raise RuntimeError("ptxas: out of luck")

    functions = {"inputs": lambda w, g, device: {}, "reference": lambda: None, "cost": lambda w, d: Cost(1, 1)}
    workloads = {"quick": [workload("fp32", N=1)]}
    broken = Operator(name="broken", axes={"N": "elements"}, workloads=workloads, **functions)
    broken.implementation("triton", arch=">=sm_90")(raises)
    (job,) = [j for j in compile_check.jobs([broken], [90])]
    (found,) = compile_check.check(*job)
    assert not found.ok and found.reason == "RuntimeError: ptxas: out of luck" and found.arch == "sm_90"
    assert [j[4] for j in compile_check.jobs([broken])] == [90, 100, 120]
    assert compile_check.summary([found], 1.0)["failed"] == 1


def test_every_implementation_of_ours_is_compiled_in_every_dtype():
    for op in registry.select():
        jobs = list(compile_check.jobs([op]))
        for made in op.implementations.values():
            mine = {(sm, w.dtype, d) for o, i, d, w, sm in jobs if i is made}
            if not made.ours:
                assert not mine
                continue
            directions = made.directions or op.directions
            assert {sm for sm, _, _ in mine} == set(made.architectures)
            assert {d for _, _, d in mine} == set(directions)
            assert {dtype for _, dtype, _ in mine} == set(made.dtypes or op.dtypes)


GENERIC_LAMBDA = re.compile(r"\[[^\[\]\n]*\]\s*\([^()\n]*\bauto\b")
CUDA_SOURCES = [p for p in (ROOT / "src/weft/operators").rglob("*.cu*") if p.suffix in (".cu", ".cuh")]


@pytest.mark.parametrize("path", CUDA_SOURCES, ids=lambda path: path.name)
def test_cuda_sources_have_no_generic_lambdas(path):
    """NVRTC 13.0, of the CUDA that PyTorch 2.11 brings, takes their bodies for host functions; later ones do not mind."""
    assert not GENERIC_LAMBDA.findall(path.read_text())


def test_a_generic_lambda_is_noticed():
    assert GENERIC_LAMBDA.search("auto drain = [&](auto put) {") and GENERIC_LAMBDA.search("f([](int a, auto b) { })")
    assert not GENERIC_LAMBDA.search("auto drain = [&](int put) {")


def test_every_architecture_has_a_limit_and_an_unknown_one_is_named_with_the_nearest():
    assert set(SHARED_LIMIT) == set(ARCHITECTURES)
    with pytest.raises(UnknownName, match="unknown architecture 'sm_91'; did you mean 'sm_90'"):
        list(compile_check.jobs([], [91]))


def test_every_argument_of_a_triton_kernel_is_given(monkeypatch):
    """After its first launch a plan passes constants by position too (Triton 3.6 counts them), in the order of the signature:
    none may be left out."""
    seen = set()

    def compared(plan, tensors, options):
        names = [*inspect.signature(plan.kernel.fn).parameters]
        assert sorted(names[len(tensors) + len(plan.scalars) :]) == sorted(plan.constants), (plan.kernel, names)
        seen.add(names[0])

    monkeypatch.setattr(launch.Plan, "_compile", compared)
    monkeypatch.setattr(cuda.CudaPlan, "__call__", lambda plan, *tensors: None)
    for job in compile_check.jobs(registry.select(()), archs=(90,)):
        assert [result.reason for result in compile_check.check(*job) if result.reason] == []
    assert len(seen) > 10


def test_shares_of_many_seeds_cover_every_point(monkeypatch):
    softmax = registry.get("softmax")
    whole = list(compile_check.jobs([softmax], [90], "", ["fp32"]))
    seen: list[str] = []
    monkeypatch.setattr(compile_check, "_check_job", lambda job: seen.append(str(job)) or [])
    for seed in map(str, range(40)):
        before = len(seen)
        compile_check.compile_check([softmax], archs=[90], dtypes=["fp32"], share=4, seed=seed, processes=1)
        assert len(seen) - before < len(whole)
    assert len(set(seen)) == len(whole)
