"""Tables of routes: the first that applies, kernels by name, and why a kernel does not take a call."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.definition import Declined, UnknownName
from weft.operators.dispatch import EMPTY, Call, Dispatch, Route


@dataclass
class Rows(Call):
    x: Tensor
    wide: int = 100

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    def __post_init__(self) -> None:
        if self.x.ndim != 2:
            raise ValueError("expected a matrix")


def odd(c: Rows) -> str:
    return "an odd number of columns" if c.n % 2 else ""


def table(**more: Any) -> Dispatch:
    return Dispatch(
        Rows, EMPTY, Route("cuda", lambda c: c.n >= c.wide, "long rows", lambda c: f"long {c.n}", odd),
        Route("cuda", lambda c: c.n < 4, "tiny rows", lambda c: f"tiny {c.n}"),
        Route("newest", lambda c: True, "of a later architecture", lambda c: "newest", sm=999),
        Route("triton", lambda c: c.n != 50, "any rows", lambda c: "any"),
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "name", "plan"), [
    ((3, 100), "cuda", "long 100"), ((3, 101), "triton", "any"), ((3, 2), "cuda", "tiny 2"), ((0, 100), "torch", None),
])  # fmt: skip
def test_the_first_route_that_applies_is_taken(shape, name, plan):
    x = torch.empty(shape)
    assert table().choose(x).implementation == name and table().of((x,)) == plan


def test_options_come_after_the_tensors():
    assert table().of((torch.empty(3, 20),), 20) == "long 20"


@pytest.mark.parametrize(("shape", "error", "words"), [((3, 50), Declined, None), ((3,), ValueError, "matrix")])
def test_a_call_that_no_route_takes_or_that_is_wrong_is_refused(shape, error, words):
    with pytest.raises(error, match=words):
        table().of((torch.empty(shape),))


def test_a_kernel_by_name_takes_what_it_supports_whatever_is_best():
    kernels = table().kernel("cuda")
    assert kernels.of((torch.empty(3, 100),)) == "long 100" and kernels.of((torch.empty(3, 2),)) == "tiny 2"
    assert kernels.of((torch.empty(3, 20),)) == "long 20"  # not chosen, but supported
    assert kernels.of((torch.empty(3, 21),)) == "tiny 21"


def test_a_kernel_by_name_says_why_it_declines():
    with pytest.raises(Declined, match="needs sm_999"):
        table().kernel("newest").of((torch.empty(3, 20),))
    with pytest.raises(UnknownName, match=r"cudb.*cuda"):
        table().kernel("cudb")
