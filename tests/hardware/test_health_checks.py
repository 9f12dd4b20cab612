"""Active checks on the CPU's stand-in: each finds a planted wrong bit, wherever it is, and a link that became slow."""

import json

import pytest

torch = pytest.importorskip("torch")

from weft.hardware.health import checks  # noqa: E402


def outcome(fault=None, records=None):
    return {r.check: r for r in checks.run("quick", "cpu", "cpu", records, fault)}


def plant(where: str, byte: int, bit: int):
    def fault(name, tensor):
        if name == where:
            tensor.view(torch.uint8).flatten()[byte] ^= bit

    return fault


def test_a_sound_device_passes_every_check():
    found = outcome()
    assert [r.check for r in found.values() if r.passed is not True] == []
    assert found.keys() == {"copy", "matmul-fp16", "matmul-bf16", "matmul-int8", "memory", "links"}


@pytest.mark.parametrize(("where", "byte", "bit"), [
    ("copy", 0, 1), ("copy", 524287, 128),
    ("matmul-fp16", 0, 1), ("matmul-fp16", 2 * 128 * 127 + 255, 2), ("matmul-fp16-again", 7777, 1),
    ("matmul-bf16", 1, 64), ("matmul-bf16-again", 2 * 128 * 128 - 2, 1),
    ("matmul-int8", 4 * 128 * 100, 1), ("matmul-int8-again", 3, 64),
    ("memory", (16 << 20) - 1, 1), ("memory-addresses", 8 * 12345 + 3, 16),
])  # fmt: skip
def test_one_planted_bit_is_found(where, byte, bit):
    name = where.removesuffix("-again").removesuffix("-addresses")
    run = {"copy": lambda f: checks.copy("cpu", f), "memory": lambda f: checks.memory("cpu", checks.STAND_IN, f)}
    run |= {f"matmul-{t}": lambda f, t=t: checks.matmul("cpu", t, checks.STAND_IN, f) for t in ("fp16", "bf16", "int8")}
    passed, found = run[name](plant(where, byte, bit))
    assert passed is False
    if where == "memory":
        assert f"offset {byte // 8 * 8:#x}" in found and f"{bit << byte % 8 * 8:#x}" in found
    if where == "copy":
        assert f"word {byte // 8} by {bit << byte % 8 * 8:#x}" in found


def test_every_product_of_the_known_answers_is_exact_in_its_dtype():
    """The host's check of C = AB refuses a matrix that is wrong in one element, and says which."""
    a, b = torch.eye(64), torch.ones(64, 64)
    c = a @ b
    assert checks._verify(a, b, c) == ""
    c[3, 5] = 2
    assert checks._verify(a, b, c) == "1 rows of a product are wrong; element (3, 5) is 2, right is 1"


def test_a_link_is_judged_by_its_own_records(tmp_path):
    records = tmp_path / "links.jsonl"
    for number in range(checks.RECORDS[0]):
        passed, found = checks.links("cpu", "cpu", records)
        assert passed and "recorded, judged after" in found, number
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    # Of another card ten times as fast, which is no matter here; and a line that a crash cut.
    others = [{**row, "gpu": "other", "gb_s": 10 * row["gb_s"]} for row in rows]
    records.write_text("".join(json.dumps(row) + "\n" for row in [*others, *rows]) + '{"gpu": "cpu", "li\n')
    assert "judged after" not in (checks.links("cpu", "cpu", records)[1])
    faster = [{**row, "gb_s": 100 * row["gb_s"]} for row in rows]
    records.write_text("".join(json.dumps(row) + "\n" for row in faster))
    passed, found = checks.links("cpu", "cpu", records)
    assert passed is False and "usual are" in found
    assert len(records.read_text().splitlines()) == len(faster)  # a slow link does not lower its own floor


def test_an_operation_that_a_device_lacks_is_not_a_fault(monkeypatch):
    def broken(*_):
        raise RuntimeError('"_int_mm" not implemented for this device')

    monkeypatch.setattr(torch, "_int_mm", broken)
    found = outcome()
    assert found["matmul-int8"].passed is None and "not implemented" in found["matmul-int8"].found


@pytest.mark.parametrize(("arguments", "status"), [
    (["--level", "quick"], 3),  # no GPU here: nothing was checked
    (["--level", "quick", "--prolog"], 0),  # which is no reason to stop a job
    (["--gpu", "7"], 3), (["--gpu", "7", "--prolog"], 0),
])  # fmt: skip
def test_exit_status(command, monkeypatch, arguments, status):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command("health", "check", *arguments)[0] == status


def test_a_fault_fails_the_prolog(command, monkeypatch):
    monkeypatch.setattr(checks, "devices", lambda wanted: {"0000:01:00": "cpu"})
    monkeypatch.setattr(checks, "copy", lambda device, plant: (False, "a bit"))
    code, out, _ = command("health", "check", "--prolog", "--json")
    assert code == 1 and json.loads(out)["failed"]
