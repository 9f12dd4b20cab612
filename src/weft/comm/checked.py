"""Checked mode: ranks compare their calls through the rendezvous store before they make them, and a watch ends a process
whose collective does not return.

A collective in which ranks disagree hangs or corrupts memory, and the library's own error, if any, names another rank. The
store is outside the collective: what each rank is about to call can be read by the others whatever state the network is in.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SLICE_S = 0.25  # how often a waiting rank looks whether another one failed, or waits elsewhere
ENDED_BY_WATCH = 5  # exit status of a rank that its watch ended


class CollectiveFailed(OSError):
    """A collective cannot complete; the message names ranks, calls and shapes. (OSError: the command prints it as one line.)"""


class Mismatch(CollectiveFailed):
    """Ranks are about to make different calls."""


class Missing(CollectiveFailed):
    """A rank did not come to a call within the deadline."""


class OtherFailed(CollectiveFailed):
    """Another rank failed, and said why."""


@dataclass(frozen=True)
class Signature:
    """What a rank is about to call. ``pairs``: elements sent to and received from each rank."""

    call: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    op: str = ""
    root: int | None = None
    pairs: tuple[list[int], list[int]] | None = None
    detail: str = ""

    def __str__(self) -> str:
        words = [self.call]
        if self.shape is not None:
            words.append(f"of shape {self.shape}")
        words += [self.dtype] * bool(self.dtype) + [f"op {self.op}"] * bool(self.op)
        words += [f"root {self.root}"] * (self.root is not None) + [self.detail] * bool(self.detail)
        return " ".join(words)

    @classmethod
    def read(cls, text: str | bytes) -> "Signature":
        given = json.loads(text)
        given["shape"] = None if given["shape"] is None else tuple(given["shape"])
        return cls(**given)


class Control:
    """This process's side of the checks: the store, the state that other ranks can read, and the watch.

    Args:
        store: a ``torch.distributed`` store that all ranks share.
        rank: global.
        ranks: how many there are.
        deadline_s: how long a rank waits for others, and how long a call may take.
        on_end: is called by the watch before it ends the process (to print what was measured).
    """

    def __init__(self, store: Any, rank: int, ranks: int, deadline_s: float, on_end: Callable[[], None] = lambda: None):
        self.store, self.rank, self.ranks, self.deadline_s, self.on_end = store, rank, ranks, deadline_s, on_end
        self._calls: dict[str, int] = {}
        self._inside: tuple[str, float, float] | None = None  # what, since when, deadline
        self._ended = threading.Event()
        store.set(f"pid/{rank}", str(os.getpid()))
        self._watch = threading.Thread(target=self._look, name="weft-comm-watch", daemon=True)
        self._watch.start()

    # ---- before a call

    def agree(self, group: str, members: Sequence[int], signature: Signature) -> None:
        """Returns when every member is about to make this call.

        Raises:
            Mismatch, Missing, CollectiveFailed: another one makes another call, does not come, or failed before.
        """
        call = self._calls[group] = self._calls.get(group, 0) + 1
        mine = json.dumps(asdict(signature))
        self.store.set(f"call/{group}/{call}/{self.rank}", mine)
        at = {"group": group, "call": call, "what": str(signature), "members": list(members), "state": "waits before"}
        self.store.set(f"at/{self.rank}", json.dumps(at))
        others = [r for r in members if r != self.rank]
        keys = [f"call/{group}/{call}/{r}" for r in others]
        until = time.monotonic() + self.deadline_s
        while not self._came(keys, until):
            self._look_elsewhere(group, call, signature, others)
            if time.monotonic() >= until:
                late = [r for r in others if not self.store.check([f"call/{group}/{call}/{r}"])]
                raise Missing(
                    f"{_ranks(late)} did not come to {signature} (call {call}) within {self.deadline_s:g} s; "
                    + "; ".join(f"rank {r} {last_state(self.store, r)}" for r in late)
                )
        theirs = {r: Signature.read(self.store.get(key)) for r, key in zip(others, keys, strict=True)}
        self._compare(call, members, theirs | {self.rank: signature})
        if call > 2:  # all have read what was posted two calls ago
            self.store.delete_key(f"call/{group}/{call - 2}/{self.rank}")

    def _came(self, keys: list[str], until: float) -> bool:
        """Whether all keys are there, within a slice of the time that is left. (The store's own wait logs each timeout.)"""
        until, pause = min(until, time.monotonic() + SLICE_S), 2e-5
        try:
            while not self.store.check(keys):
                if time.monotonic() >= until:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 2e-3)
        except RuntimeError as error:
            raise CollectiveFailed(f"the rendezvous store is gone: the process that has it ended ({error})") from None
        return True

    def _look_elsewhere(self, group: str, call: int, signature: Signature, others: Sequence[int]) -> None:
        """Another rank that failed, or that waits for this one in another group."""
        for r in range(self.ranks):
            if r != self.rank and self.store.check([f"failed/{r}"]):
                raise OtherFailed(self.store.get(f"failed/{r}").decode())
        for r in others:
            at = _at(self.store, r)
            if (
                at
                and at["state"] == "waits before"
                and at["group"] != group
                and self.rank in at["members"]
                and self._calls.get(at["group"], 0) < at["call"]
            ):
                raise Mismatch(
                    f"order of calls: rank {self.rank} is at {signature} of group {group} (call {call}), "
                    f"rank {r} at {at['what']} of group {at['group']} (call {at['call']}); each waits for the other"
                )

    def _compare(self, call: int, members: Sequence[int], found: dict[int, Signature]) -> None:
        first = found[members[0]]
        if any(not _alike(found[r], first) for r in members):
            odd = min(members, key=lambda r: (sum(_alike(found[r], other) for other in found.values()), -r))
            beside = next(m for m in members if not _alike(found[m], found[odd]))
            raise Mismatch(f"call {call}: rank {odd} calls {found[odd]}, rank {beside} calls {found[beside]}")
        if first.pairs is not None:
            for i, a in enumerate(members):
                for j, b in enumerate(members):
                    sent, received = found[a].pairs[0][j], found[b].pairs[1][i]  # type: ignore[index]
                    if sent != received:
                        raise Mismatch(
                            f"call {call} ({first}): rank {a} sends {sent:,} elements to rank {b}, which receives {received:,}"
                        )

    # ---- during a call

    @contextlib.contextmanager
    def region(self, what: str, deadline_s: float | None = None) -> Iterator[None]:
        """What this process does now; when it takes longer than the deadline the watch ends the process."""
        before, self._inside = self._inside, (what, time.monotonic(), deadline_s or self.deadline_s)
        at = _at(self.store, self.rank) or {"group": "", "call": 0, "members": []}
        posted = {k: at[k] for k in ("group", "call", "members")}
        self.store.set(f"at/{self.rank}", json.dumps({**posted, "what": what, "state": "is in"}))
        try:
            yield
        except BaseException:
            self._inside = before  # what is posted stays: it is where this rank failed
            raise
        self._inside = before
        then = ("is in", before[0]) if before else ("has left", what)
        self.store.set(f"at/{self.rank}", json.dumps({**posted, "what": then[1], "state": then[0]}))

    def _look(self) -> None:
        while not self._ended.wait(SLICE_S):
            inside = self._inside
            if inside is None or time.monotonic() - inside[1] < inside[2]:
                continue
            what, since, deadline_s = inside
            with contextlib.suppress(Exception):
                time.sleep(SLICE_S)  # others reach theirs
            if self._inside is None or self._inside[1] != since:
                continue
            message = f"rank {self.rank} is in {what} since {deadline_s:g} s, at {_line_of_main_thread()}"
            try:
                states = [f"rank {r} {last_state(self.store, r)}" for r in range(self.ranks) if r != self.rank]
                silent = [s for r, s in enumerate(states) if not self.store.check([f"failed/{r + (r >= self.rank)}"])]
            except Exception as error:
                states = silent = [f"the store does not answer: {error}"]
            self.fail("; ".join([message, *silent]))
            sys.stderr.write(f"weft: {'; '.join([message, *states])}\n")
            self.on_end()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ENDED_BY_WATCH)

    def fail(self, message: str) -> None:
        """Tells the other ranks and the process that started this one."""
        with contextlib.suppress(Exception):
            self.store.set(f"failed/{self.rank}", message)

    def close(self) -> None:
        self._ended.set()
        self._watch.join(2 * SLICE_S)

    # ---- through the store

    def gather(self, key: str, value: Any) -> list[Any] | None:
        """Every rank's value (JSON), on rank 0; None elsewhere. All ranks call it with the same key, once."""
        if self.rank:
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            return None
        keys = [f"{key}/{r}" for r in range(1, self.ranks)]
        until = time.monotonic() + self.deadline_s
        while not self._came(keys, until):
            self._look_elsewhere("", 0, Signature(key), ())
            if time.monotonic() >= until:
                late = [r for r in range(1, self.ranks) if not self.store.check([f"{key}/{r}"])]
                raise Missing(
                    f"{_ranks(late)} sent nothing about {key} within {self.deadline_s:g} s; "
                    + "; ".join(f"rank {r} {last_state(self.store, r)}" for r in late)
                )
        found = [value, *(json.loads(self.store.get(k)) for k in keys)]
        for k in keys:
            self.store.delete_key(k)
        return found


def _line_of_main_thread() -> str:
    """``loop.py:12 in step``: where this process's own code is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and (os.sep + "torch" + os.sep in frame.f_code.co_filename) and frame.f_back:
        frame = frame.f_back
    return (
        f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame
        else "its end"
    )


def _at(store: Any, rank: int) -> dict[str, Any] | None:
    return json.loads(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else None


def last_state(store: Any, rank: int) -> str:
    """What a rank did last, as it told the store: ``is in all_reduce of shape (8,) float32 op sum (call 3)``."""
    at = _at(store, rank)
    if at is None:
        return "has called nothing yet"
    return f"{at['state']} {at['what']}" + (f" (call {at['call']})" if at["call"] else "")


def _alike(a: Signature, b: Signature) -> bool:
    """The same call. Counts by rank differ rightly, and a rank that neither sends nor receives has no dtype."""
    return (a.call, a.shape, a.op, a.root, a.detail, a.pairs is None) == (
        (b.call, b.shape, b.op, b.root, b.detail, b.pairs is None)
    ) and (a.dtype == b.dtype or "" in (a.dtype, b.dtype))


def _ranks(found: Sequence[int]) -> str:
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"
