"""Weights and states of optimizers saved to a file and read back, as a run does that is resumed."""

import copy
import io

import pytest
import torch


def through_a_file(states, weights_only: bool = True):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def resumed(params, optimizer, made):
    """Parameters and an optimizer out of a file that goes on where this one is.

    Args:
        made: a function of parameters that makes the optimizer into which the state is loaded.
    """
    saved = through_a_file({"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in params]})
    weights = [torch.nn.Parameter(p) for p in saved["weights"]]
    other = made(weights)
    other.load_state_dict(saved["optimizer"])
    return weights, other


def check_refused(optimizer, index: int, changed: dict, words: str) -> None:
    """A state dict in which the state of a parameter is ``changed`` (None: missing) is refused, and nothing of it is loaded."""
    broken, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    broken["param_groups"][0]["lr"] = 7.0
    broken["state"][index] = {k: v for k, v in (broken["state"][index] | changed).items() if v is not None}
    with pytest.raises(ValueError, match=f"loaded state dict, parameter {index}: {words}"):
        optimizer.load_state_dict(broken)
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]
    for state, kept in zip(optimizer.state_dict()["state"].values(), before["state"].values(), strict=True):
        assert state.keys() == kept.keys() and all(state[k].equal(kept[k]) for k in kept)
    optimizer.load_state_dict(before)
    optimizer.step()
