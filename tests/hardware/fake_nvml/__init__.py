"""GPUs that are not there: a fake libnvidia-ml.so.1, built from C, and the control file that says what its GPUs do.

Put ``FakeNvml.environment`` into the environment of a process before it starts; then the file may change at any time.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
COMPILER = shutil.which("cc")
EVERY, ALL = "*", -1  # function, GPU

# error codes of nvml.h
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST, VERSION_MISMATCH, UNKNOWN = (
    3,
    4,
    9,
    13,
    15,
    18,
    999,
)


def build(folder: Path) -> Path:
    """Builds ``libnvidia-ml.so.1`` in a folder (0.3 s); returns the folder, for LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        command = [
            str(COMPILER),
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Werror",
            "-pthread",
            "-o",
            str(library),
            str(SOURCE),
        ]
        subprocess.run(command, check=True)
    return folder


class FakeNvml:
    """So many H100s; each method rewrites the control file, at once for every process that uses it."""

    def __init__(self, library: Path, control: Path, gpus: int = 2):
        self.control, self.lines = control, {"gpus": [f"gpus {gpus}"]}
        path = os.pathsep.join(filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH")]))
        self.environment = {"LD_LIBRARY_PATH": path, "FAKE_NVML": str(control)}
        self._write()

    def _write(self) -> None:
        new = self.control.with_suffix(".new")
        new.write_text("\n".join(line for group in self.lines.values() for line in group) + "\n")
        new.replace(self.control)

    def _add(self, group: str, line: str) -> None:
        self.lines.setdefault(group, []).append(line)
        self._write()

    def gpus(self, count: int) -> None:
        """How many GPUs NVML counts."""
        self.lines["gpus"] = [f"gpus {count}"]
        self._write()

    def set(self, gpu: int = ALL, **values: float) -> None:
        """Readings by the names in fake_nvml.c: temperature_c, power_mw, gpu_util, throttle (bits), rows_pending …"""
        for name, value in values.items():
            self.lines.setdefault("set", []).append(f"set {gpu} {name} {value}")
        self._write()

    def mig(self, gpu: int, profile: str = "1g.10gb", sm: int = 16, mib: int = 9856) -> None:
        self._add("mig", f"mig {gpu} {profile} {sm} {mib}")

    def process(self, gpu: int, pid: int, mib: int = 1000, instance: int = -1) -> None:
        self._add("process", f"process {gpu} {pid} {mib} {instance}")

    def error(self, code: int, function: str = EVERY, gpu: int = ALL) -> None:
        self._add("fault", f"error {function} {gpu} {code}")

    def vanish(self, gpu: int) -> None:
        """The GPU has fallen off the bus: NVML still counts it, and every call on it says that it is lost."""
        self.error(LOST, EVERY, gpu)

    def hang(self, function: str = EVERY, gpu: int = ALL) -> None:
        self._add("fault", f"hang {function} {gpu}")

    def crash(self, function: str = EVERY, gpu: int = ALL) -> None:
        """SIGSEGV in the process that calls."""
        self._add("fault", f"crash {function} {gpu}")

    def listened(self, seconds: float = 20.0) -> None:
        """Waits until a process listens to events."""
        deadline = time.monotonic() + seconds
        while not self.control.with_name(f"{self.control.name}.events").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("no process listens to NVML's events")
            time.sleep(0.02)

    def xid(self, gpu: int, code: int) -> None:
        """An XID event, for those who wait for events now."""
        self._add("xid", f"xid {gpu} {code}")

    def heal(self) -> None:
        """Ends every error, hang and crash."""
        self.lines.pop("fault", None)
        self._write()
