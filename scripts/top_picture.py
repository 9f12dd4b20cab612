"""Draws docs/pictures/top.svg: ``weft top`` over eight GPUs of the tests' fake NVML, with what one may meet on a real machine.

PYTHONPATH=src:tests/hardware python scripts/top_picture.py docs/pictures/top.svg
"""

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

from fake_nvml import FakeNvml, build

from weft.hardware.telemetry.processes import Owner
from weft.hardware.telemetry.reader import read_once
from weft.hardware.telemetry.top import Top
from weft.hardware.telemetry.view import View

LOADS = [97, 96, 98, 97, 42, 0, 0, 88]
WHO = [
    ("ada", "3f9c01d2a4be", "4711", "python"),
    ("chen", "", "4712", "torchrun"),
    ("prod", "b81a76544d53", "", "vllm"),
]


def view() -> View:
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeNvml(build(Path(folder)), Path(folder) / "control", gpus=8)
        os.environ |= fake.environment
        owners = {}
        for gpu, load in enumerate(LOADS):
            throttle = 1 if load < 50 else 0
            fake.set(
                gpu, gpu_util=load, tensor=load * 0.6, temperature_c=34 + load * 0.4, power_mw=1000 * (90 + 5.9 * load)
            )
            fake.set(gpu, sm_clock_mhz=1980 if load else 345, throttle=throttle)
            if load:
                pid = 20_000 + 37 * gpu
                fake.process(gpu, pid, mib=800 * load, instance=1 if gpu == 4 else -1)
                owners[pid] = Owner(*WHO[(gpu == 7) + 2 * (gpu == 4)])
        fake.set(2, throttle=0x24, temperature_c=88, sm_clock_mhz=1515)
        fake.set(3, throttle=0x04, sm_clock_mhz=1755)
        fake.mig(4, "1g.10gb", 16, 9856)
        fake.mig(4, "3g.40gb", 60, 40448)
        fake.vanish(6)
        return View(read_once(pause_s=0.1), owners)


async def draw(path: str) -> None:
    found = view()
    app = Top(lambda: found, interval_s=60)
    async with app.run_test(size=(80, 27)) as pilot:
        await pilot.pause(0.5)
        picture = app.export_screenshot(title="weft top")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # no font is fetched from elsewhere
    Path(sys.argv[1]).write_text(picture)


asyncio.run(draw(sys.argv[1]))
