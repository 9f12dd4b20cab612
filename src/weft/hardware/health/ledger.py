"""What is known of a node's faults, and the decisions that follow: crash-safe, in one SQLite file.

Events become **incidents** (one fault with its repeats), incidents that need it become a **quarantine**, which has an
identity of its own. An incident is over by evidence that is newer than its last event: a passed check that began after
the repair that its action asks for. Of each kind of evidence only the newest time counts, so that the order in which
events arrive, and how often, does not matter.

A person's word is above evidence. ``release`` ends the incidents; what happens later is new. ``override``, for a node
that a person returned in the scheduler, accepts the incidents that the scheduler showed: they and their repeats do not
quarantine the node again.
"""

import fcntl
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.hardware.health import catalogue
from weft.hardware.health.event import EVIDENCE, Event

WINDOW_S = 300.0  # events of one fault that are no farther apart are one incident
AGAIN_S = 7 * 86400.0  # a fault that was repaired and comes back within this time asks for the next stronger action
SKEW_S = 60.0  # how far evidence may lie in the future
TEXTS = 100  # lines that are stored of one incident
KEEP_S = 30 * 86400.0  # how long events are remembered
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS events(
  id TEXT PRIMARY KEY, time REAL, kind TEXT, gpu TEXT, source TEXT, text TEXT, incident INTEGER, stored REAL);
CREATE TABLE IF NOT EXISTS facts(gpu TEXT, name TEXT, time REAL, PRIMARY KEY(gpu, name));
CREATE TABLE IF NOT EXISTS incidents(
  id INTEGER PRIMARY KEY, gpu TEXT, kind TEXT, pid INTEGER, location TEXT, action TEXT, first REAL, last REAL, count INTEGER,
  state TEXT, how TEXT DEFAULT '', cleared REAL DEFAULT 0, shown INTEGER DEFAULT 0, quarantine TEXT, source TEXT DEFAULT '',
  details TEXT);
CREATE INDEX IF NOT EXISTS incidents_by_kind ON incidents(gpu, kind);
CREATE INDEX IF NOT EXISTS incidents_by_state ON incidents(state);
CREATE TABLE IF NOT EXISTS quarantines(
  id TEXT PRIMARY KEY, opened REAL, ended REAL, how TEXT DEFAULT '', applied INTEGER DEFAULT 0, drained INTEGER DEFAULT 0,
  waiting TEXT DEFAULT '');
"""
LADDER = ("drain", "reset", "reboot", "inspect")


class StateError(OSError):
    """The state cannot be read or written; the message says what to do."""


@dataclass(frozen=True)
class Incident:
    """One fault of one GPU with its repeats. ``state``: ``noted`` (needs no quarantine), ``open``, ``closed``; ``how``
    it was closed: ``repaired``, ``released`` or ``accepted`` by a person, ``stale`` (already repaired when its event
    arrived)."""

    id: int
    gpu: str
    kind: str
    pid: int | None
    location: str | None
    action: str
    first: float
    last: float
    count: int
    state: str
    how: str
    cleared: float
    shown: bool
    quarantine: str | None
    source: str
    details: dict[str, Any]

    def words(self) -> str:
        name = f"XID {self.kind[4:]}" if self.kind.startswith("xid:") else self.kind
        drill = "drill: " if self.details.get("drill") else ""
        return f"{drill}{name} on {'GPU ' + self.gpu if self.gpu else 'the node'} ({self.action})"


@dataclass(frozen=True)
class Quarantine:
    """A decision to take the node out of service. ``applied``: the scheduler has it; ``ended`` is None while it holds."""

    id: str
    opened: float
    ended: float | None
    how: str
    applied: bool
    drained: bool
    waiting: str
    incidents: tuple[Incident, ...]

    def reason(self) -> str:
        """In one line, for people: identity, the worst incident, how many more."""
        pending = [i for i in self.incidents if i.state == "open"] or list(self.incidents)
        worst = max(pending, key=lambda i: (catalogue.ACTIONS.index(i.action), i.last), default=None)
        more = f", and {len(pending) - 1} more" if len(pending) > 1 else ""
        return f"{self.id}: {worst.words() if worst else 'no incident'}{more}"


class Ledger:
    """Args:
    path: the SQLite file, or ``:memory:``.
    now: the clock, in seconds since 1970.

    Raises:
        StateError: the file cannot be opened or written, or is of another version.
    """

    def __init__(self, path: str | Path = ":memory:", now: Callable[[], float] = time.time):
        self.path, self.now = Path(path), now
        self._memory = str(path) == ":memory:"
        self._mutex = threading.RLock()
        self._locked: Any = None
        self._taken = 0
        if not self._memory:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StateError(f"{self.path.parent}: {error.strerror}; choose another folder with --state") from error
        with self._explained():
            self._db = sqlite3.connect(str(path), check_same_thread=False, timeout=5, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            if not self._memory:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")  # a decision survives a power cut
            with self._transaction():
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                version = self._meta("schema")
                if version is None:
                    self._set_meta("schema", str(SCHEMA_VERSION))
                elif int(version) != SCHEMA_VERSION:
                    raise StateError(
                        f"{self.path} is of version {version}, this weft reads {SCHEMA_VERSION}: move it away"
                    )

    # ---- the file

    def lock(self) -> None:
        """Holds the state until the process ends: one daemon a node.

        Raises:
            StateError: another process holds it.
        """
        try:
            file = open(f"{self.path}.lock", "a+")  # noqa: SIM115  (held open)
        except OSError as error:
            raise StateError(f"{self.path}.lock: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise StateError(
                f"another weft health (process {holder}) runs on {self.path}: one daemon a node; "
                "stop it or choose another --state"
            ) from error
        try:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        except OSError as error:
            raise StateError(f"{self.path}.lock: {error.strerror}") from error
        self._locked = file

    def close(self) -> None:
        with self._mutex:
            self._db.close()
            if self._locked:
                self._locked.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            advice = {
                "full": "the disk is full: free some room; events wait and nothing is decided meanwhile",
                "unable to open": "it cannot be opened: check that its folder exists and is writable",
                "readonly": "it is not writable",
                "not a database": "it is no SQLite file: move it away",
                "malformed": "it is damaged: move it away",
                "locked": "another process holds it",
                "disk I/O": "the disk is full or does not answer: see df and the kernel's log",
            }
            why = next((advice[key] for key in advice if key in text), "see the message")
            raise StateError(f"{self.path}: {why} ({text})") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._mutex, self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled back already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row and row[0]

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def remembered(self, key: str) -> str | None:
        """A value that was stored with :meth:`take`, such as how far a log was read."""
        with self._mutex, self._explained():
            return self._meta(key)

    # ---- events

    def take(self, events: Iterable[Event], remember: dict[str, str] | None = None) -> list[str]:
        """Stores events and decides, in one transaction; returns what was decided, in words."""
        said: list[str] = []
        with self._transaction():
            touched = False
            for event in events:
                touched = self._take(event, said) or touched
            for key, value in (remember or {}).items():
                self._set_meta(key, value)
            if touched:
                self._decide(said)
            self._taken += 1
            if self._taken % 1000 == 1:
                self._db.execute("DELETE FROM events WHERE stored < ?", (self.now() - KEEP_S,))
        return said

    def _take(self, event: Event, said: list[str]) -> bool:
        at = event.time or self.now()
        try:
            self._db.execute(
                "INSERT INTO events(id, time, kind, gpu, source, text, stored) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (event.id, at, event.kind, event.gpu, event.source, event.text, self.now()),
            )
        except sqlite3.IntegrityError:  # a duplicate
            return False
        if event.kind in EVIDENCE:
            name = f"absent:{event.details['kind']}" if event.kind == "absent" else event.kind
            self._fact(event.gpu, name, at)
            return True
        fault = catalogue.find(event.kind)
        action = fault.act(event.details)
        if fault.action == "recovery-action" and action == "ignore":  # the driver needs nothing any more
            self._fact(event.gpu, f"absent:{event.kind}", at)
            if event.details.get("recovery_before"):
                self._fact(event.gpu, "reset", at)
            return True
        pid = event.details.get("pid") if fault.category == "application" else None
        row = self._same(event, pid, at)
        if row:
            action = catalogue.worse(row["action"], action)
            reopened = row["state"] == "noted" and catalogue.needs_quarantine(action)
            more = int(event.source == row["source"])  # what the log says NVML says too
            self._db.execute(
                "UPDATE incidents SET first=min(first, ?), last=max(last, ?), count=count+?, action=?, state=? WHERE id=?",
                (at, at, more, action, "open" if reopened else row["state"], row["id"]),
            )
            incident = row["id"]
        else:
            location = event.details.get("location")
            action = self._escalated(fault, event.gpu, at, action, location, said)
            accepted = at <= self._newest(event.gpu, f"accepted:{event.kind}")
            state = "noted" if not catalogue.needs_quarantine(action) else "closed" if accepted else "open"
            incident = self._db.execute(
                "INSERT INTO incidents(gpu, kind, pid, location, action, first, last, count, state, how, source,"
                " details) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?)",
                (event.gpu, event.kind, pid, location, action, at, at, state, "accepted" if state == "closed" else "",
                 event.source, json.dumps(event.details)),
            ).lastrowid  # fmt: skip
        text = event.text if not row or row["count"] < TEXTS else ""
        self._db.execute("UPDATE events SET incident=?, text=? WHERE id=?", (incident, text, event.id))
        return True

    def _same(self, event: Event, pid: int | None, at: float) -> sqlite3.Row | None:
        """The incident that an event repeats: one that is open, was accepted or noted and is no farther than the window, or was
        over only after the event. NVML names no process, the kernel's log does."""
        rows = self._db.execute(
            "SELECT * FROM incidents WHERE gpu=? AND kind=? AND (pid IS ? OR pid IS NULL OR ? IS NULL) AND first-?<=?"
            " ORDER BY last DESC LIMIT 50",
            (event.gpu, event.kind, pid, pid, WINDOW_S, at),
        )
        for row in rows:
            ended = row["last"] < self._newest(event.gpu, f"absent:{event.kind}") <= at
            near = at <= row["last"] + WINDOW_S and not ended
            if row["state"] == "open" or (near and (row["state"] == "noted" or row["how"] == "accepted")):
                return row
            if row["state"] == "closed" and row["how"] != "accepted" and at <= row["cleared"]:
                return row
        return None

    def _escalated(
        self, fault: catalogue.Fault, gpu: str, at: float, action: str, location: str | None, said: list[str]
    ) -> str:
        """A fault that comes again and again asks for more."""
        rule = fault.escalation
        if rule and (location or not rule.same_location):
            query = "SELECT count(*) FROM incidents WHERE gpu=? AND kind=? AND first>? AND first<=?"
            values: list[Any] = [gpu, fault.kind, at - rule.within_s, at]
            if rule.same_location:
                query, values = query + " AND location=?", [*values, location]
            earlier = self._db.execute(query, values).fetchone()[0]
            if earlier + 1 >= rule.count:
                said.append(
                    f"{fault.kind} on {gpu or 'the node'}: incident {earlier + 1} within {rule.within_s / 3600:g} h"
                )
                action = catalogue.worse(action, rule.action)
        if catalogue.needs_quarantine(action):
            repaired = self._db.execute(
                "SELECT count(*) FROM incidents WHERE gpu=? AND kind=? AND how='repaired' AND last>? AND last<=?",
                (gpu, fault.kind, at - AGAIN_S, at),
            ).fetchone()[0]
            action = LADDER[min(LADDER.index(action) + repaired, len(LADDER) - 1)]
        return action

    def _fact(self, gpu: str, name: str, at: float) -> None:
        self._db.execute(
            "INSERT INTO facts VALUES (?, ?, ?) ON CONFLICT(gpu, name) DO UPDATE"
            " SET time=CASE WHEN time<=? THEN max(time, excluded.time) ELSE excluded.time END",
            (gpu, name, at, self.now() + SKEW_S),
        )

    def _newest(self, gpu: str, name: str) -> float:
        """Of a GPU, or of its whole node. What is in the future was noted while the clock was wrong, and proves nothing."""
        row = self._db.execute(
            "SELECT max(time) FROM facts WHERE gpu IN (?, '') AND name=? AND time<=?", (gpu, name, self.now() + SKEW_S)
        ).fetchone()
        return row[0] or 0.0

    # ---- decisions

    def _repair(self, i: Incident) -> float | None:
        """When what an incident's action asks for was done; None while it was not."""
        level = catalogue.find(i.kind).level
        if i.action == "drain" and not level:
            return i.last
        evidence = [self._newest(i.gpu, "boot")]
        if i.action != "reboot":
            evidence.append(self._newest(i.gpu, "reset"))
        if level:
            evidence.append(self._newest(i.gpu, f"absent:{i.kind}"))
        return max(evidence) if max(evidence) > i.last else None

    def _cleared(self, i: Incident) -> float | None:
        """Since when an incident is over; None while it is not. Later events are another incident."""
        repair = self._repair(i)
        passed = self._newest(i.gpu, "passed")
        if i.action == "inspect" or repair is None or passed < repair or passed <= i.last:
            return None
        return repair if repair > i.last else passed

    def _decide(self, said: list[str]) -> None:
        for i in self._incidents("state='open'"):
            if i.last <= self._newest(i.gpu, f"accepted:{i.kind}"):  # it came late: a person has seen a newer one
                self._db.execute("UPDATE incidents SET state='closed', how='accepted' WHERE id=?", (i.id,))
                continue
            cleared = self._cleared(i)
            if cleared is None:
                continue
            how = "repaired" if i.quarantine else "stale"
            self._db.execute("UPDATE incidents SET state='closed', how=?, cleared=? WHERE id=?", (how, cleared, i.id))
        active = self._db.execute("SELECT id FROM quarantines WHERE ended IS NULL").fetchone()
        identity = active and active[0]
        fresh = self._incidents("state='open' AND quarantine IS NULL")
        if fresh and not identity:
            identity = f"q-{uuid.uuid4().hex[:8]}"
            self._db.execute("INSERT INTO quarantines(id, opened) VALUES (?, ?)", (identity, self.now()))
            said.append(f"quarantine {identity} begins: {fresh[0].words()}")
        elif fresh:
            said.extend(f"quarantine {identity} also has {i.words()}" for i in fresh)
        for i in fresh:
            self._db.execute("UPDATE incidents SET quarantine=? WHERE id=?", (identity, i.id))
        if identity and not self._incidents("state='open'"):
            hows = {i.how for i in self._incidents("quarantine=?", identity)}
            how = hows.pop() if len(hows) == 1 else "repaired"
            self._db.execute("UPDATE quarantines SET ended=?, how=? WHERE id=?", (self.now(), how, identity))
            said.append(f"quarantine {identity} ends: {how}")

    def _incidents(self, where: str, *values: Any) -> list[Incident]:
        rows = self._db.execute(f"SELECT * FROM incidents WHERE {where} ORDER BY id", values)
        return [
            Incident(**{**dict(row), "shown": bool(row["shown"]), "details": json.loads(row["details"] or "{}")})
            for row in rows
        ]

    # ---- people, and what the scheduler says

    def release(self, why: str) -> list[str]:
        """A person returns the node: every open incident is over. Events after this moment are new ones."""
        return self._accept("state='open'", [], why, "released")

    def override(self, identity: str, why: str) -> list[str]:
        """A person undid a quarantine in the scheduler: accepts the incidents of it that the scheduler showed, with
        their repeats. Others stay."""
        return self._accept("state='open' AND quarantine=? AND shown=1", [identity], why, "accepted", identity)

    def _accept(self, where: str, values: list[Any], why: str, how: str, ended: str | None = None) -> list[str]:
        said: list[str] = []
        with self._transaction():
            accepted = self._incidents(where, *values)
            for i in accepted:
                until = self.now() if how == "released" else i.last
                self._db.execute("UPDATE incidents SET state='closed', how=?, cleared=? WHERE id=?", (how, until, i.id))
                self._fact(i.gpu, f"accepted:{i.kind}", until)
                said.append(f"{how}, {why}: {i.words()}")
            if ended:  # what the person did not see gets a quarantine of its own
                self._db.execute("UPDATE incidents SET quarantine=NULL WHERE quarantine=? AND state='open'", (ended,))
                self._db.execute(
                    "UPDATE quarantines SET ended=?, how='overridden' WHERE id=? AND ended IS NULL", (self.now(), ended)
                )
                said.append(f"quarantine {ended} ends: overridden, {why}")
            self._decide(said)
        return said

    def adopt(self, identity: str) -> None:
        """The node has the mark of a quarantine that is not known here (the state was lost): it is taken over, and ends when a
        check passes."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO quarantines(id, opened, applied) VALUES (?, ?, 1)", (identity, self.now())
            )
            self._db.execute(
                "INSERT INTO incidents(gpu, kind, action, first, last, count, state, shown, quarantine, details)"
                " VALUES ('', 'state-lost', 'drain', ?, ?, 1, 'open', 1, ?, '{}')",
                (self.now(), self.now(), identity),
            )

    def progress(self, quarantine: Quarantine, *, applied: bool, drained: bool, waiting: str) -> None:
        """What the scheduler has of a quarantine; its incidents, as they were passed to it, count as shown to people."""
        with self._transaction():
            self._db.execute(
                "UPDATE quarantines SET applied=?, drained=?, waiting=? WHERE id=?",
                (applied, drained, waiting, quarantine.id),
            )
            if applied:
                for i in quarantine.incidents:
                    self._db.execute("UPDATE incidents SET shown=1 WHERE id=?", (i.id,))

    # ---- questions

    def quarantine(self, identity: str) -> Quarantine | None:
        """One by identity, ended or not."""
        with self._mutex, self._explained():
            row = self._db.execute("SELECT * FROM quarantines WHERE id=?", (identity,)).fetchone()
            return row and self._quarantine(row)

    def active(self) -> Quarantine | None:
        """The one that holds."""
        with self._mutex, self._explained():
            row = self._db.execute("SELECT * FROM quarantines WHERE ended IS NULL").fetchone()
            return row and self._quarantine(row)

    def _quarantine(self, row: sqlite3.Row) -> Quarantine:
        incidents = tuple(self._incidents("quarantine=?", row["id"]))
        return Quarantine(
            row["id"], row["opened"], row["ended"], row["how"], bool(row["applied"]), bool(row["drained"]), row["waiting"],
            incidents,
        )  # fmt: skip

    def incidents(self) -> list[Incident]:
        """All of them, oldest first."""
        with self._mutex, self._explained():
            return self._incidents("1")

    def needs(self, i: Incident) -> str:
        """What an open incident waits for: ``person``, ``reboot``, ``reset``, ``absent`` (a condition that holds still) or
        ``check``."""
        with self._mutex, self._explained():
            if i.action == "inspect":
                return "person"
            if self._repair(i) is not None:
                return "check"
            return "absent" if i.action == "drain" else i.action
