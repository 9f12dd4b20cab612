"""The figures of each step as CSV, and as TensorBoard's events."""

import csv
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

COLUMNS = (
    "step", "loss", "lr", "gradient_norm", "ms", "images/s", "tokens/s", "mfu", "validation_loss", "accuracy",
)  # fmt: skip


class Log:
    """``<out>/log.csv``, whose rows after ``start`` (of a run that goes on from a checkpoint) are dropped first; with
    ``tensorboard`` also ``<out>/tensorboard``.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed; the message has the install line.
        OSError: it cannot be written (a full disk); the file is named.
    """

    def __init__(self, out: str, start: int, tensorboard: bool) -> None:
        self.events: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as missing:
                raise ModuleNotFoundError(
                    "TensorBoard's log needs tensorboard: pip install 'weft[tensorboard]'", name="tensorboard"
                ) from missing
            self.events = SummaryWriter(Path(out, "tensorboard"), purge_step=start)
        path = Path(out, "log.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        before = []
        if start and path.is_file():
            with open(path, newline="", encoding="utf-8", errors="replace") as file:
                whole = [line for line in file if line.endswith("\n")]  # the last one may have been cut
            rows = [(row.get("step") or "", row) for row in csv.DictReader(whole)]
            before = [row for step, row in rows if step.isdecimal() and int(step) <= start]
        part = path.with_suffix(".part")
        try:
            with open(part, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(before)
            os.replace(part, path)
        except OSError as error:
            raise _unwritten(error, str(path)) from None
        self.file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        self.writer = csv.DictWriter(self.file, COLUMNS)

    def write(self, figures: dict[str, Any]) -> None:
        try:
            self.writer.writerow({name: value for name, value in figures.items() if value is not None})
            self.file.flush()
            if self.events:
                for name, value in figures.items():
                    if name != "step" and value is not None:
                        self.events.add_scalar(name, value, figures["step"])
        except OSError as error:
            raise _unwritten(error, self.file.name) from None

    def close(self) -> None:
        with suppress(OSError):  # each row was flushed, or its error raised
            self.file.close()
        if self.events:
            with suppress(OSError):
                self.events.close()


def _unwritten(error: OSError, file: str) -> OSError:
    return OSError(error.errno, f"log cannot be written: {error.strerror or error}", file)
