#!/usr/bin/env python3
"""Which of weft's requirements this Python lacks, as JSON, PyTorch and Triton left alone. Run by scripts/setup.py.

    .venv/bin/python scripts/missing_packages.py gpu,test,docs,cluster

Writes {"missing": [requirement, …], "keep": [name==version, …], "notes": [sentence, …]}. It runs where PyTorch must
stay exactly as it is: `keep` is the constraints file under which the missing ones are installed.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

KEPT = ("torch", "triton", "pytorch-triton")


def requirements(project: dict[str, Any], extras: list[str]) -> list[Requirement]:
    """The requirements of the base and of some extras; an extra that names weft's own extras is followed."""
    wanted, seen, queue = [], set(), [*project["dependencies"]]
    extras = list(extras)
    while queue or extras:
        if not queue:
            extra = extras.pop(0)
            if extra not in seen:
                queue += project["optional-dependencies"][extra]
                seen.add(extra)
            continue
        requirement = Requirement(queue.pop(0))
        if requirement.name == project["name"]:
            extras += sorted(requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            wanted.append(requirement)
    return wanted


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def for_cuda_12(wanted: list[Requirement]) -> list[Requirement]:
    """A CUDA 12 PyTorch brings its own NVRTC under another name; bindings for CUDA 13 would not find it."""
    kept = [r for r in wanted if canonicalize_name(r.name) != "nvidia-cuda-nvrtc"]
    return [Requirement(f"{r.name}{r.specifier},<13") if r.name == "cuda-bindings" else r for r in kept]


def plan(wanted: list[Requirement], cuda: str | None) -> dict[str, list[str]]:
    """What to install, what to hold, and what to tell, for requirements and PyTorch's CUDA version."""
    if cuda and cuda.startswith("12."):
        wanted = for_cuda_12(wanted)
    missing, notes = [], []
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        version = installed_version(name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        if name in KEPT:
            if not fits:
                state = f"{version} is older than weft wants" if version else "is not installed"
                notes.append(f"{name} {state} ({requirement.specifier}); left as it is")
        elif not fits:
            missing.append(f"{requirement.name}{requirement.specifier}")
    keep = [f"{name}=={version}" for name in KEPT if (version := installed_version(name))]
    return {"missing": sorted(set(missing)), "keep": keep, "notes": notes}


def main() -> None:
    with (Path(__file__).resolve().parents[1] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    try:
        import torch

        cuda = torch.version.cuda
    except ImportError:
        cuda = None
    print(json.dumps(plan(requirements(project, sys.argv[1].split(",")), cuda)))


if __name__ == "__main__":
    main()
