"""The numbers of the learner's own machine, measured once and filled into the lessons: ``{{machine.dram_gb_s}}``.

| name | is |
|---|---|
| ``name``, ``cores`` | the processor and its cores |
| ``device`` | what was measured: the GPU where there is one, else the processor |
| ``dram_gb_s`` | bytes read from its main memory a second, in 1e9 |
| ``fp32_gflop_s`` | fp32 matrix products, 1e9 operations a second |
| ``bf16_gflop_s``, ``fp16_gflop_s``, ``tf32_gflop_s`` | the same in other types, on a GPU |
| ``balance`` | operations it can do while one byte arrives: fp32_gflop_s / dram_gb_s |
"""

import json
import os
import re
from pathlib import Path
from typing import Any

FILE = ".weft-machine.json"
NAMES = ("name", "cores", "device", "dram_gb_s", "fp32_gflop_s", "balance")  # that a lesson may use


def has_gpu() -> bool:
    """Whether there may be an NVIDIA GPU, without importing PyTorch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def numbers(folder: Path) -> dict[str, Any]:
    """What was measured on this machine; measured now (2 s) where the folder has none of it. Empty without PyTorch."""
    from weft.hardware import query

    path = folder / FILE
    here = query.name("cpu")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("name") == here:
            return found
    except (OSError, ValueError):
        pass
    try:
        import torch  # noqa: F401
    except ImportError:
        return {"name": here, "cores": os.cpu_count()}
    found = {"name": here, "cores": os.cpu_count(), **_measured()}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _measured() -> dict[str, Any]:
    from weft.hardware import ceilings, query

    device = query.choose_device()
    found = ceilings.measure(device, quick=True)
    rate = found.matrix["fp32"] / 1e9
    bandwidth = found.bandwidth[1, 0] / 1e9
    return {
        "device": query.name(device),
        "dram_gb_s": round(bandwidth, 1),
        "fp32_gflop_s": round(rate),
        "balance": round(rate / bandwidth, 1),
        **{f"{dtype}_gflop_s": round(value / 1e9) for dtype, value in found.matrix.items()},
    }


def filled(text: str, found: dict[str, Any], language: str) -> str:
    """A lesson with this machine's numbers.

    Raises:
        ValueError: The lesson asks for a number that there is none of.
    """
    missing = "（未测量：pip install 'weft[gpu]'）" if language == "zh" else "(not measured: pip install 'weft[gpu]')"

    def number(match: re.Match[str]) -> str:
        if match[1] not in NAMES:
            raise ValueError(f"a lesson asks for {{{{machine.{match[1]}}}}}; there are {', '.join(NAMES)}")
        return str(found.get(match[1], missing))

    return re.sub(r"\{\{machine\.(\w+)\}\}", number, text)
