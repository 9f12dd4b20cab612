"""``weft deploy render``: the files of a target, and a folder that holds exactly these."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from weft.cluster.files.text import TraceError
from weft.cluster.specification import NAME, Specification, read
from weft.definition import UnknownName
from weft.records import write_whole

RACK = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")  # a label's value


def list_of(target: str, folder: Path) -> Path:
    """Where the folder names the files that weft wrote for a target, which it may replace and remove."""
    return folder / f".rendered-{target}"


def listed(target: str, folder: Path) -> set[str]:
    """Those files."""
    path = list_of(target, folder)
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def targets() -> dict[str, Callable[[Specification], dict[str, str]]]:
    from weft.deploy import cloud, compose, kubernetes, slurm

    return {"cloud": cloud.render, "compose": compose.render, "kubernetes": kubernetes.render, "slurm": slurm.render}


def load(path: Path) -> Specification:
    """A cluster file that can be deployed: every group of nodes has a name of its own, as Kubernetes and Slurm take it, and so
    has its rack.

    Raises:
        TraceError: as :func:`weft.cluster.specification.read`, or such a name or rack.
    """
    made, seen = read(path), dict[str, int]()
    for pool in made.pools:
        if not NAME.fullmatch(pool.name):
            raise TraceError(
                f"{path}:{pool.line}: name is {pool.name!r}; expected lower-case letters, digits and dashes"
            )
        if not RACK.fullmatch(pool.nodes.rack):
            raise TraceError(
                f"{path}:{pool.line}: rack is {pool.nodes.rack!r}; expected letters, digits and -_. between, at most 63, as"
                " values of labels in Kubernetes are"
            )
        if pool.name in seen:
            raise TraceError(
                f"{path}:{pool.line}: a second group '{pool.name}' (line {seen[pool.name]}); expected a name each"
            )
        seen[pool.name] = pool.line
    return made


def render(made: Specification, target: str) -> dict[str, str]:
    """File → text, the same for the same cluster file.

    Raises:
        UnknownName: no such target.
    """
    known = targets()
    if target not in known:
        raise UnknownName("target", target, known)
    return dict(sorted(known[target](made).items()))


def write(files: dict[str, str], folder: Path, target: str) -> list[str]:
    """Makes the folder hold these files; those of an earlier rendering of the same target that are no longer among them are
    removed. Returns the names of those that changed. The next call completes one that a full disk or a crash ended.

    Raises:
        ValueError: a file is in the way that was not rendered for this target, or a link, which may lead out of the folder;
            nothing is written then.
        OSError: a file cannot be written; names it.
    """
    own = list_of(target, folder)
    for name in (own.name, *files):
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name} is a symbolic link; name another folder, or remove it")
    before = listed(target, folder)
    for name in files:
        if name not in before and (folder / name).exists():
            old = folder / ".rendered"  # of one target, before targets had lists of their own
            remove = f"it and what an older weft wrote, which {old} lists" if old.is_file() else "it"
            raise ValueError(
                f"{folder / name} exists and was not rendered by weft for {target}; name another folder, or remove {remove}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not before >= set(files):  # before the files: what is written from here on is weft's, however this ends
        write_whole(own, _lines(before | set(files)))
    changed = []
    for name in sorted(before - set(files)):
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            (folder / name).unlink(missing_ok=True)
            changed.append(name)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            write_whole(path, text)
            changed.append(name)
        if name.endswith(".sh"):
            path.chmod(0o755)
    if before - set(files) or not own.exists():
        write_whole(own, _lines(files))
    return changed


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in sorted(names))
