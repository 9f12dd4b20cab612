"""Checkpoints: folders of torch.distributed.checkpoint, each complete or not there, read on any number of ranks."""

import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from weft.train import ranks

KEPT = 2  # the newest and the one before
META = "weft.json"


def newest(out: str, where: Callable[[dict[str, Any]], bool] = lambda facts: True) -> Path | None:
    """The last complete checkpoint of the run that began last below ``out``, of those whose facts are as ``where`` says."""
    found = [p.parent for p in Path(out, "checkpoints").glob(f"step-*/{META}")]
    return max((folder for folder in found if where(_facts(folder))), key=_age, default=None)


def beginning(out: str) -> float:
    """Now, for a run that begins; later than the runs before it below ``out``, whatever another machine's clock said."""
    last = newest(out)
    return max(time.time(), _age(last)[0] + 1e-3 if last else 0.0)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = {}
    return facts if isinstance(facts, dict) else {}


def _age(folder: Path) -> tuple[float, str]:
    """When its run began, and the step: a folder may hold what an earlier, longer run left."""
    return _facts(folder).get("began", 0.0), folder.name


def save(folder: Path, model: Any, optimizer: Any, facts: dict[str, Any]) -> None:
    """Writes a checkpoint beside ``folder`` and renames it when it is whole; then deletes all but the newest two.

    Args:
        folder: ``…/checkpoints/step-00000100``.
        facts: of the run, as JSON; with ``step``, ``model`` and ``began``, in seconds.

    Raises:
        OSError: it cannot be written (a full disk); what was there before is whole.
    """
    part = folder.with_name(f".{folder.name}.part")
    main = ranks.rank() == 0
    if main:
        for left in folder.parent.glob(".step-*.part"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp.save(_state(model, optimizer), checkpoint_id=part, no_dist=not dist.is_initialized())
        if main:
            (part / META).write_text(json.dumps(facts | {"ranks": ranks.world()}, indent=1), encoding="utf-8")
            _to_disk(part)
            shutil.rmtree(folder, ignore_errors=True)
            part.replace(folder)
    except (CheckpointException, OSError, RuntimeError) as error:
        if main:
            shutil.rmtree(part, ignore_errors=True)
        cause = _cause(error)
        number, why = (cause.errno, cause.strerror) if isinstance(cause, OSError) else (errno.EIO, _line(cause))
        raise OSError(number, f"checkpoint not written, the one before is whole: {why}", str(folder)) from None
    if main:
        for old in sorted(folder.parent.glob("step-*"), key=_age)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


def load(folder: Path, model: Any, optimizer: Any, expected: dict[str, Any]) -> dict[str, Any]:
    """Reads weights, optimizer state and, on as many ranks as wrote it, random states in; returns the facts.

    Args:
        expected: the arguments of the network.

    Raises:
        ValueError: the checkpoint is of another model or cannot be read.
    """
    try:
        facts = json.loads((folder / META).read_text(encoding="utf-8"))
        if missing := {"step", "model", "ranks", "scaler", "settings"} - set(facts):
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint '{folder}' cannot be read: {META}: {error}") from None
    if facts["model"] != expected:
        names = sorted(n for n in facts["model"].keys() | expected.keys() if facts["model"].get(n) != expected.get(n))
        differ = ", ".join(f"{n} {facts['model'].get(n)} there, {expected.get(n)} here" for n in names)
        raise ValueError(f"checkpoint '{folder}' is of another model: {differ}")
    state = _state(model, optimizer)
    if facts["ranks"] != ranks.world():
        del state["random"]
    readable(folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as error:  # a damaged pickle may raise any
        raise ValueError(f"checkpoint '{folder}' cannot be read: {_line(_cause(error))}") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if random := state.get("random"):
        mine = random[str(ranks.rank())]
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"])
    return facts


def readable(folder: Path) -> None:
    """Raises ValueError where the metadata of a checkpoint, a pickle, cannot be read."""
    try:
        dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle may raise any
        raise ValueError(f"checkpoint '{folder}' cannot be read: .metadata: {_line(error)}") from None


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    return {"model": weights, "optimizer": moments, "random": {str(ranks.rank()): random}}


def _to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cause(error: BaseException) -> BaseException:
    """The file system's error behind a checkpoint's, or what the first rank that failed says."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def _line(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "a file of it ends too early"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
