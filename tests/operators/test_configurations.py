"""Configurations of kernels: measured ones, the heuristic, trials, and those in the repository."""

import json

import pytest
import torch
from where import ROOT, printed

from weft import registry
from weft.definition import SHARED_LIMIT
from weft.operators import configs
from weft.operators.configs import Configurations, bucket, grid_of
from weft.operators.normalization import dispatch, ring


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(Configurations, "all", [])
    monkeypatch.setattr(configs, "target_sm", lambda device: 90)
    return Configurations(str(tmp_path / "kernels.py"), "forward", lambda sm, dtype, n: {"BLOCK": sm * n})


def test_measured_configurations_come_before_the_heuristic(configuration, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sm_90.json").write_text('{"forward,16-bit,64": {"BLOCK": 7}}')
    assert configuration(torch.device("cpu"), torch.bfloat16, 64) == {"BLOCK": 7}
    assert configuration(torch.device("cpu"), torch.float16, 64) == {"BLOCK": 7}  # the same bytes
    assert configuration(torch.device("cpu"), torch.float32, 64) == {"BLOCK": 90 * 64}
    assert configuration(torch.device("cpu"), torch.bfloat16, 65) == {"BLOCK": 90 * 65}


def test_a_trial_comes_before_everything_and_keys_are_noted(configuration):
    configuration.asked = []
    configuration.trial = {"BLOCK": 1}
    assert configuration(torch.device("cpu"), torch.float32, 64) == {"BLOCK": 1}
    assert configuration.asked == [(90, torch.float32, 64)]


def test_a_trial_may_be_for_one_key_alone(configuration):
    configuration.trial, configuration.trial_key = {"BLOCK": 1}, (90, torch.float32, 64)
    assert [configuration(torch.device("cpu"), torch.float32, n)["BLOCK"] for n in (64, 65)] == [1, 90 * 65]


def test_written_configurations_are_read_and_earlier_ones_stay(configuration, tmp_path):
    at = torch.device("cpu")
    assert configuration(at, torch.float32, 64) == {"BLOCK": 90 * 64}
    configuration.write(90, {"forward,fp32,64": {"BLOCK": 3}, "forward,fp32,1024": {"BLOCK": 4}})
    path = configuration.write(90, {"forward,fp32,128": {"BLOCK": 5}})
    assert [configuration(at, torch.float32, n)["BLOCK"] for n in (64, 128, 1024)] == [3, 5, 4]
    assert list(json.loads(path.read_text())) == ["forward,fp32,64", "forward,fp32,128", "forward,fp32,1024"]
    assert path == tmp_path / "configs" / "sm_90.json"


def test_buckets_are_powers_of_two_and_grids_are_complete():
    assert [bucket(n) for n in (0, 1, 2, 3, 1024, 1025)] == [1, 1, 2, 4, 1024, 2048] and bucket(3, 16) == 16
    assert list(grid_of({"A": (1, 2), "B": (3,)})) == [{"A": 1, "B": 3}, {"A": 2, "B": 3}]


def test_committed_configurations_name_kernels_that_exist():
    registry.select()
    known = {(c.folder, c.name) for c in Configurations.all}
    switches = {"ABREAST", "DIAGONAL", "RELAYED", "SHARED", "STREAM", "WALK"}  # off is 0; all others are sizes
    for path in (ROOT / "src" / "weft" / "operators").rglob("configs/sm_*.json"):
        for key, config in json.loads(path.read_text()).items():
            assert (path.parent, key.split(",")[0]) in known, f"{path}: {key}"
            assert config and all(type(v) is int for v in config.values()), f"{path}: {key}"
            assert all(v > 0 or (v == 0 and k in switches) for k, v in config.items()), f"{path}: {key}"


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("n", [256, 512, 1024, 4096, 8192, 16384, 32768, 65536, 131072])
def test_a_third_tensor_leaves_the_gradient_of_a_norm_eight_warps_a_multiprocessor(n, centered):
    """Of 16-bit floats, where instructions are many. With RMSNorm's choice for two tensors of 1024 columns five were left, and
    add_rms_norm took 637 us where add_layer_norm with eight took 537 on an H200."""
    c = dispatch.added_ring_configuration(torch.device("meta"), torch.bfloat16, n, centered)
    found = ring.layout(90, c, torch.bfloat16, n, 3, 2)
    room = (SHARED_LIMIT[90] + ring.SYSTEM) // (found.shared + ring.own_bytes(found.rows, c["THREADS"]))
    assert min(c["PER_SM"], room) * c["THREADS"] >= 8 * 32


@pytest.mark.share(2)
def test_rows_are_loaded_by_the_longest_vectors_that_divide_them():
    """Triton alone sees only whether 16 divides a row's length: of 4,104 columns it loads each by itself."""
    found = json.loads(printed(str(ROOT / "tests/operators/vector_widths.py")))
    right = {4096: (16, 16), 4104: (16, 16), 4100: (8, 16), 4102: (4, 8), 4101: (2, 4)}
    assert found == {
        f"{n} {d}": [w] for n, of in right.items() for d, w in zip(("bfloat16", "float32"), of, strict=True)
    }
