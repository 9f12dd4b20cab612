"""Which PyTorch fits a machine: pure functions, for scripts/setup.py. Standard library alone."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # set-up runs before weft is installed

from weft.hardware.driver import fitting_build

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """What went wrong, and what to do about it; ``afresh`` when the next run must not build on what is there."""

    def __init__(self, reason: str, fix: str, afresh: bool = False) -> None:
        super().__init__(reason)
        self.fix = fix
        self.afresh = afresh


@dataclass(frozen=True)
class Choice:
    """Which PyTorch. ``requirement`` is None when an installed one is reused; ``index`` None is pip's own setting."""

    kind: str  # "reuse", "cuda", "cpu" or "index"
    requirement: str | None
    index: str | None
    constrained: bool  # constraints.txt applies
    reason: str


def choose(
    *,
    torch_index: str | None = None,
    reusable_torch: str | None = None,
    driver: str | None = None,
    capability: tuple[int, int] | None = None,
    torch_builds: tuple[str, ...] = (),
    pinned: str = "",
    linux: bool = True,
) -> Choice:
    """Chooses the PyTorch.

    ``torch_index`` is the user's WEFT_TORCH_INDEX, ``reusable_torch`` the version of an installed PyTorch that sees
    the GPU, ``driver`` the version of an NVIDIA driver with a GPU, ``capability`` that GPU's, ``torch_builds`` what
    pip's own index offers, ``pinned`` the version in constraints.txt. Raises SetupError where no build fits.
    """
    if torch_index:
        requirement = "torch>=2.10" if driver else f"torch=={pinned}"
        return Choice("index", requirement, torch_index, not driver, "WEFT_TORCH_INDEX names the index")
    if reusable_torch:
        return Choice("reuse", None, None, False, f"PyTorch {reusable_torch} is installed and sees the GPU")
    if driver:
        build = fitting_build(driver, capability)
        if build is None:
            raise SetupError(
                f"the NVIDIA driver {driver} is too old for every PyTorch that weft supports",
                "upgrade the driver to 580.65.06 or later (525.60.13 at least): "
                "sudo apt-get install nvidia-driver-580-server, then reboot",
            )
        index, requirement = build
        newest = "the default build" if index is None else f"the {index.rsplit('/', 1)[-1]} build"
        gpu = f" on sm_{capability[0]}{capability[1]}" if capability else ""
        return Choice("cuda", requirement, index, False, f"{newest} is the newest that driver {driver}{gpu} takes")
    if not linux:
        return Choice("cpu", f"torch=={pinned}", None, True, "no GPU; off Linux the default build is for the CPU")
    # On Linux the default index's plain build brings 3 GB of CUDA; "+cpu" names the build without.
    if f"{pinned}+cpu" in torch_builds:
        return Choice("cpu", f"torch=={pinned}+cpu", None, True, "no GPU; pip's own index has the CPU build")
    return Choice("cpu", f"torch=={pinned}+cpu", CPU_INDEX, True, "no GPU; the CPU build is on PyTorch's own index")


def pinned_version(constraints: str, package: str) -> str:
    """The version that the text of a constraints file pins a package to."""
    found = re.search(rf"^{re.escape(package)}==([^\s#;]+)", constraints, re.MULTILINE)
    if not found:
        raise SetupError(f"constraints.txt pins no {package}", f"add a line {package}==… to constraints.txt")
    return found.group(1)


def offered_versions(text: str) -> tuple[str, ...]:
    """The versions in what ``pip index versions`` wrote."""
    found = re.search(r"^Available versions:\s*(.+)$", text, re.MULTILINE)
    return tuple(version.strip() for version in found.group(1).split(",")) if found else ()


def torch_command(choice: Choice) -> list[str] | None:
    """pip's arguments that install the chosen PyTorch alone; None when there is nothing to install."""
    if choice.requirement is None:
        return None
    command = ["install", choice.requirement]
    if choice.constrained:
        command += ["-c", "constraints.txt"]
    if choice.index:
        command += ["--index-url", choice.index]
    return command
