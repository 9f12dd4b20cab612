"""``with weft.profile() as p: … p.step()``: PyTorch's profiler over a few steps of a loop, and nothing outside of them."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INSTALL = "pip install 'weft[gpu]'"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without PyTorch's word that events of an earlier cycle are gone: there is one cycle."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events", category=UserWarning)
        yield


class profile:
    """Records ``active`` steps after ``wait`` and ``warm_up`` others, then writes the trace and stops.

    Args:
        out: the trace's path, ending in ``.json`` or ``.json.gz``; by default it is kept in memory only.
        wait: steps that pass unprofiled.
        warm_up: steps during which the profiler already runs, and whose events are dropped; starting it is slow.
        active: steps to record; None records the whole block, and ``step`` then only marks steps.
        stacks: record Python stacks and modules as well. This slows the host down several times: gaps between kernels then say
            little.
        most_mib: the most that the trace may have, unpacked; events are left out until it fits
            (:func:`weft.profiling.bounded.write`).

    ``result`` is a :class:`weft.profiling.tables.Profile` once the last active step is over.

    Raises:
        ModuleNotFoundError: PyTorch is not installed; the message has the install line.
        ValueError: a negative number of steps, no active one, or a path of another kind.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        wait: int = 0,
        warm_up: int = 1,
        active: int | None = 3,
        stacks: bool = False,
        most_mib: int = 64,
    ):
        if wait < 0 or warm_up < 0 or (active is not None and active < 1):
            raise ValueError(
                f"wait={wait}, warm_up={warm_up}, active={active}; expected 0 or more, 0 or more, 1 or more"
            )
        if out is not None and not str(out).endswith((".json", ".json.gz")):
            raise ValueError(f"out is '{out}'; expected a path that ends in .json or .json.gz")
        try:
            from torch import profiler
            from torch.cuda import is_available
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"profiling needs PyTorch: {INSTALL}", name="torch") from missing
        self.out, self.active, self.most_mib = None if out is None else Path(out), active, most_mib
        self.wait = wait if active else 0
        self.needed = self.wait + warm_up + 1 if active else 0
        self.steps = 0
        self.left_out: list[str] = []  # of the written trace, to keep it small
        self._data: dict[str, Any] | None = None
        self._result: Any = None
        self._running = False
        on = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if is_available() else [])]
        with warnings.catch_warnings():  # no warm-up is the caller's choice
            warnings.simplefilter("ignore", UserWarning)
            when = profiler.schedule(wait=0, warmup=warm_up, active=active, repeat=1) if active else None
        self._profiler = profiler.profile(
            activities=on,
            schedule=when,
            on_trace_ready=self._ready,
            record_shapes=True,
            profile_memory=True,
            with_stack=stacks,
            with_modules=stacks,
        )

    def __enter__(self) -> "profile":
        if self.steps == self.wait:
            self._start()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self.stop()
        if kind is None and self._data is None:
            raise ValueError(
                f"the block ended after {self.steps} calls of step(), before anything was recorded; expected at least "
                f"{self.needed} (wait + warm_up + 1), or active=None to record the whole block"
            )

    def step(self) -> None:
        """Call it at the end of each step of the loop. After the last active one it does nothing."""
        self.steps += 1
        if self._running:
            with quiet():
                self._profiler.step()
        elif self.steps == self.wait:
            self._start()

    def _start(self) -> None:
        from torch import version

        if version.cuda and tuple(map(int, version.cuda.split(".")[:2])) >= (
            12,
            6,
        ):  # before, graphs and teardown crash
            os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else each launch afterwards costs the host 2 µs more
        with quiet():
            self._profiler.start()
        self._running = True

    @property
    def done(self) -> bool:
        """Whether the trace is there."""
        return self._data is not None

    def stop(self) -> None:
        """Ends the recording early: steps that are recorded by then are kept."""
        if self._running:
            self._running = False
            self._profiler.stop()

    @property
    def result(self) -> Any:
        """The analysed profile.

        Raises:
            ValueError: nothing has been recorded yet.
        """
        from weft.profiling import analysis, kineto

        if self._data is None:
            raise ValueError(f"nothing is recorded before step {self.needed}; this is step {self.steps}")
        if self._result is None:
            self._result = analysis.analyse(kineto.parse(self._data, str(self.out or "profile")))
        return self._result

    def _ready(self, recorded: Any) -> None:
        from weft.profiling import bounded, kineto

        first = self._data is None
        self._running = False
        if not first:
            return
        with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
            raw = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(raw))
            self._data = kineto.load(raw)
            if os.environ.get("RANK", "").isdecimal():
                self._data.setdefault("rank", int(os.environ["RANK"]))
            if self.out is not None:
                self.left_out = bounded.write(self._data, self.out, self.most_mib << 20)
