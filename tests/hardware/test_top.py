"""``weft top``: every figure in 80 columns, each field by itself; the program keeps its keys while the driver hangs."""

import asyncio
import json
import os
import threading

import pytest
from fake_nvml import NOT_SUPPORTED
from rich.console import Console

from weft.hardware.telemetry import view
from weft.hardware.telemetry.nvml import THROTTLE, Gpu, Process, Snapshot
from weft.hardware.telemetry.processes import Owner
from weft.hardware.telemetry.reader import read_once


def text_of(found: view.View, width: int = 80) -> str:
    console = Console(width=width, color_system=None, markup=True)
    with console.capture() as capture:
        for part in (view.head(found), view.gpu_table(found), view.process_table(found)):
            console.print(part)
    return capture.get()


@pytest.fixture
def busy(fake_nvml):
    """Eight GPUs: busy, hot, lost, idle, with MIG, with a field that may not be read."""
    fake_nvml.gpus(8)
    fake_nvml.set(gpu_util=97, tensor=61)
    fake_nvml.set(2, throttle=0x24, temperature_c=88)
    fake_nvml.set(3, throttle=0x1FF)
    fake_nvml.vanish(6)
    fake_nvml.mig(5, "3g.40gb", 60, 40448)
    fake_nvml.process(5, 4_194_301, mib=2048, instance=0)
    fake_nvml.process(0, os.getpid(), mib=61_440)
    fake_nvml.error(NOT_SUPPORTED, "nvmlDeviceGetPowerUsage", gpu=7)
    return fake_nvml


def test_every_figure_is_in_80_columns(busy):
    shown = text_of(view.View.of(read_once(pause_s=0.01)))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and "7 × NVIDIA H100 80GB HBM3, 1 lost" in lines[0]
    rows = {line.split()[0]: line for line in lines if line.strip()[:1].isdigit() and "H100" not in line}
    for word in ("97 %", "61 %", "60.0/80.0", "100/700", "40", "1500", "idle"):
        assert word in next(line for line in lines if line.lstrip().startswith("0 "))
    assert "power cap, heat" in shown and "88" in rows["2"] and "GPU is lost" in rows["6"] and "–/700" in rows["7"]
    assert "2.0/39.5" in next(line for line in lines if "3g.40gb" in line)
    assert all(reason in " ".join(shown.split()) for reason in ("sync boost", "POWER BRAKE", "set clocks"))
    owner = view.View.of(read_once()).owners[os.getpid()]
    assert f"{os.getpid()}" in shown and owner.user in shown and owner.command[:15] in shown
    assert set(view.REASONS) == set(THROTTLE.values())


def test_once_as_json_has_units_reasons_and_owners(busy, command):
    code, out, _ = command("top", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["gpus"]) == 8
    assert found["gpus"][2]["throttle_reasons"] == ["sw_power_cap", "sw_thermal_slowdown"]
    assert found["gpus"][7]["power_w"] is None and found["gpus"][7]["missing"] == {"power_w": "Not Supported"}
    (process,) = found["gpus"][0]["processes"]
    assert process["memory_bytes"] == 60 * 2**30 and process["user"] and process["command"]
    assert found["gpus"][6]["problem"] == "GPU is lost" and found["gpus"][5]["mig"][0]["tensor_active"] == 0.61
    code, out, _ = command("top", "--once")
    assert code == 0 and "slowed by" in out


def test_without_a_driver_it_says_so(fake_nvml, command):
    fake_nvml.error(9, "nvmlInitWithFlags")
    code, out, _ = command("top", "--once")
    assert code == 1 and out.startswith("NVML does not start: Driver Not Loaded") and out.count("\n") == 1
    code, _, err = command("top", "--interval", "0")
    assert code == 2 and "interval: 0 s; expected at least 0.1" in err


def test_any_field_may_be_missing():
    whole = Gpu(index=3, uuid="u", name="n", processes=[Process(1)])
    shown = text_of(view.View(Snapshot(gpus=[whole])))
    assert shown.count("–") >= 8 and "None" not in shown
    assert "no GPU" in text_of(view.View(Snapshot()))


@pytest.mark.parametrize("name", ["[red]x[/red]", "\x1b[31mx", "a\nb", "\u202etxt", "[/]", "[bold"])
def test_hostile_names_are_shown_as_they_are(name):
    gpu = Gpu(index=0, name=name, processes=[Process(7)])
    shown = text_of(view.View(Snapshot(gpus=[gpu]), {7: Owner(user=name, command=name)}), width=120)
    assert "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("".join(c if c.isprintable() else "?" for c in name)) == 3


# ---- the program


def run(app, script):
    """Runs the program without a terminal, 80 × 24, and the script against it."""

    async def both():
        async with app.run_test(size=(80, 24)) as pilot:
            await script(pilot)

    asyncio.run(asyncio.wait_for(both(), 20))


async def until(pilot, condition):
    for _ in range(100):
        if condition():
            return
        await pilot.pause(0.05)
    pytest.fail("it does not come to that")


def shown_by(app) -> str:
    import html

    return html.unescape(app.export_screenshot()).replace("\xa0", " ")


def test_the_program_shows_sorts_and_pauses():
    top = pytest.importorskip("weft.hardware.telemetry.top", exc_type=ImportError)
    reads = []

    def read() -> view.View:
        reads.append(1)
        a = Gpu(index=0, gpu_util_percent=37, processes=[Process(11, memory_bytes=2**30, sm_util_percent=90)])
        b = Gpu(index=1, gpu_util_percent=64, processes=[Process(22, memory_bytes=2**33, sm_util_percent=5)])
        return view.View(Snapshot(gpus=[a, b]), {11: Owner("ada"), 22: Owner("bob")})

    async def script(pilot):
        await until(pilot, lambda: len(reads) >= 2)
        await pilot.pause()
        shown = shown_by(pilot.app)
        assert "37 %" in shown and "64 %" in shown and shown.index("bob") < shown.index("ada")  # by memory
        await pilot.press("s", "s")
        await pilot.pause()
        shown = shown_by(pilot.app)
        assert "by SM" in shown and shown.index("ada") < shown.index("bob")
        await pilot.press("space")
        await pilot.pause(0.3)
        before = len(reads)
        await pilot.pause(0.5)
        assert len(reads) == before and "paused" in shown_by(pilot.app)

    run(top.Top(read, 0.1), script)


def test_the_program_keeps_its_keys_while_the_driver_hangs():
    top = pytest.importorskip("weft.hardware.telemetry.top", exc_type=ImportError)
    answer, reads = threading.Event(), []

    def read() -> view.View:
        reads.append(1)
        answer.wait(15)
        return view.View(Snapshot(problem="NVML did not answer within 3 s: the driver hangs"))

    async def script(pilot):
        await pilot.pause(0.4)
        await pilot.press("space")
        assert pilot.app.paused and len(reads) == 1  # no second reading while one waits
        answer.set()
        await until(pilot, lambda: "the driver hangs" in shown_by(pilot.app))
        await pilot.press("q")

    app = top.Top(read, 0.1)
    run(app, script)
    assert app.return_code == 0
