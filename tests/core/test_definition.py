"""The definition of an operator: workloads as text, cases, costs, and which implementations run where."""

import re
import subprocess
import sys

import pytest
from where import plain_environment

from weft.definition import Cost, Implementation, Operator, UnknownName, Workload, workload


def toy(**changed) -> Operator:
    return Operator(
        **{
            "name": "toy", "axes": {"M": "rows", "N": "columns"}, "inputs": lambda w, g, device: {},
            "reference": lambda: None, "cost": lambda w, direction: Cost(1, 1),
            "options": {"layout": ("sliced", "strided"), "dim": range(-2, 2), "weight": (True, False)},
            "workloads": {
                "verify": [workload(M=1, N=2), workload("bf16", M=3, N=4)],
                "bench": [workload(M=1, N=2, layout="sliced", dim=0, weight=True)],
            },
            **changed,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("text", "axes", "options"), [
    ("M=4096,N=5000", {"M": 4096, "N": 5000}, {}), ("N=5, M=4", {"M": 4, "N": 5}, {}),
    ("M=4k,N=2**20", {"M": 4096, "N": 2**20}, {}), ("M=1m,N=2G", {"M": 2**20, "N": 2**31}, {}),
    ("M=0,N=0", {"M": 0, "N": 0}, {}),
    ("M=1,N=2,layout=sliced,dim=-1,weight=False", {"M": 1, "N": 2}, {"layout": "sliced", "dim": -1, "weight": False}),
])  # fmt: skip
def test_parse_reads_what_is_written(text, axes, options):
    parsed = toy().parse(text, "fp16")
    assert (dict(parsed.axes), dict(parsed.options), parsed.dtype) == (axes, options, "fp16")
    assert toy().parse(str(parsed), "fp16") == parsed


@pytest.mark.parametrize(("text", "words"), [
    ("M=1", "lacks N: write M=64,N=64"), ("", "lacks M, N"), ("M=5,,N=7", "part '' of 'toy' should read NAME=VALUE"),
    ("M=1,N=1,layuot=sliced", "did you mean 'layout'"), ("M", "part 'M' of 'toy' should read NAME=VALUE"),
    ("M=x,N=1", "size of axis M is 'x'; expected a whole number"), ("M=1.5,N=1", "size of axis M is '1.5'"),
    ("M=-1,N=1", "size of axis M is -1; expected 0"), ("M=,N=1", "size of axis M is ''"),
    ("M=2**64,N=1", "expected 0 or more, and under 2**62"), ("M=2**,N=1", "size of axis M is '2**'"),
    ("M=1,N=1,Q=3", "unknown axis of 'toy' 'Q'"), ("M=1,N=1,M=2", "names M twice"),
    ("M=1,N=1,dim=0,dim=1", "names dim twice"), ("M=2**40,N=2**40", "expected under 2**59"),
    ("M=1,N=1,dim=7", "option dim of 'toy' is 7; expected a whole number, -2 … 1"),
    ("M=1,N=1,dim=x", "option dim of 'toy' is x"), ("M=1,N=1,dim=True", "option dim of 'toy' is True"),
    ("M=1,N=1,layout=slcied", "unknown layout of 'toy' 'slcied'; did you mean 'sliced'?"),
    ("M=1,N=1,layout=3", "unknown layout of 'toy' '3'"), ("M=1,N=1,weight=no", "unknown weight of 'toy' 'no'"),
])  # fmt: skip
def test_parse_says_what_is_wrong(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        toy().parse(text)


HUGE = "from weft.definition import _size\ntry: _size('M', '9**999999999')\nexcept ValueError as error: print(error)"


def test_a_huge_exponent_is_refused_before_it_is_computed():
    command = [sys.executable, "-c", HUGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8, env=plain_environment())
    assert "size of axis M is" in done.stdout and "expected" in done.stdout


def test_cases_give_each_workload_in_each_dtype_and_pinned_ones_once():
    assert [(w["M"], w.dtype) for w in toy().cases("verify")] == [(1, "fp32"), (1, "fp16"), (1, "bf16"), (3, "bf16")]
    assert [(w["M"], w.dtype) for w in toy().cases("verify", ["fp16"])] == [(1, "fp16")]


def test_cost_adds_up():
    cost = Cost(reads=10, writes=6, matrix_flops={"bf16": 100.0, "tf32": 20.0}, vector_flops=3, special_ops=1)
    assert cost.bytes_moved == 16 and cost.flops == 124


def test_an_implementation_says_why_it_cannot_run():
    def made(**declared):
        return Implementation("toy", "one", lambda: None, **{"backend": "triton", **declared})

    assert made(arch=">=sm_90").absent("cuda", 90) == ""
    assert made(arch=">=sm_90").absent("cuda", 86) == "needs >=sm_90, this GPU is sm_86"
    assert made(devices=("cuda",)).absent("cpu") == "runs on cuda only"
    assert "no-such-distribution is not installed" in made(requires="no-such-distribution").absent("cpu")
    assert made(arch=">=sm_90").architectures == [90, 100, 120]
    assert made(backend="torch").architectures == [] and not made(backend="torch").ours


def test_an_implementation_is_registered_once_and_a_direction_is_known():
    operator = toy()
    operator.implementation("triton")(lambda: None)
    with pytest.raises(ValueError, match="'toy' already has an implementation 'triton'"):
        operator.implementation("triton")(lambda: None)
    with pytest.raises(UnknownName, match="unknown direction 'backwards'; did you mean 'backward'"):
        toy(directions=("forward", "backwards"))


def test_workloads_read_like_dictionaries_of_sizes():
    w = Workload({"M": 3}, "bf16", {"layout": "sliced"})
    assert (w["M"], w.option("layout"), w.option("dim", -1), w.bytes_per_element) == (3, "sliced", -1, 2)
    assert w.at("fp32").dtype == "fp32" and str(w) == "M=3,layout=sliced"
    assert workload("bf16", M=3, layout="sliced") == w
