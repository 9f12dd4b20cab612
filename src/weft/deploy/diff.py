"""``weft deploy diff``: what rendering would change in a folder, or applying in a live cluster."""

import difflib
import shutil
import subprocess
from pathlib import Path

from weft.deploy.rendering import listed


def against_folder(files: dict[str, str], folder: Path, target: str) -> str:
    """A unified diff from the folder's files of a target to the rendered ones; empty where nothing would change."""
    parts = []
    for name in sorted(set(files) | listed(target, folder)):
        path = folder / name
        old = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        new = files.get(name, "").splitlines()
        ends = (str(path) if old else "/dev/null", name if name in files else "/dev/null")
        parts += list(difflib.unified_diff(old, new, *ends, lineterm=""))
    return "\n".join(parts)


def against_cluster(files: dict[str, str], timeout_s: float = 120) -> str:
    """What ``kubectl diff`` says of the objects that would be applied, by the cluster's own defaults; empty where nothing
    would change.

    Raises:
        FileNotFoundError: no kubectl.
        OSError: the cluster does not answer, or refuses an object.
    """
    if not shutil.which("kubectl"):
        raise FileNotFoundError("kubectl is not on the PATH; compare with a folder instead")
    apart = ("kustomization.yaml", "gpu-operator/values.yaml", "monitoring/plain/")
    text = "".join(text for name, text in files.items() if name.endswith(".yaml") and not name.startswith(apart))
    try:
        done = subprocess.run(
            ["kubectl", "diff", "--server-side", "--force-conflicts", "-f", "-"],
            input=text, capture_output=True, text=True, timeout=timeout_s, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"the cluster has not answered within {timeout_s:g} s") from None
    if done.returncode > 1:
        raise OSError(f"kubectl diff failed: {done.stderr.strip()[:2000]}")
    return done.stdout
