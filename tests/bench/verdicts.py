"""What the verifier says of an implementation that a test defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from where import DEVICE

pytest.importorskip("torch")

from weft.bench import verify
from weft.definition import Operator


def verdicts(op: Operator, function: Callable[..., Any], direction: str = "forward") -> dict[str, verify.Result]:
    """The result of each verify workload."""
    found = {}
    for w in op.cases("verify"):
        found[f"{w} {w.dtype}"] = verify.run(verify.Check(op, "one", direction, w, function), DEVICE)
    return found


def assert_right(op: Operator, function: Callable[..., Any], direction: str = "forward") -> None:
    assert {at: r.reason for at, r in verdicts(op, function, direction).items() if r.status != "pass"} == {}


def assert_wrong(op: Operator, function: Callable[..., Any], words: str = "", direction: str = "forward") -> None:
    """On some workload, and for what it computes, not because it raises."""
    failed = [r.reason for r in verdicts(op, function, direction).values() if r.status == "fail"]
    judged = [reason for reason in failed if "Error: " not in reason]
    assert any(words in reason for reason in judged), failed
