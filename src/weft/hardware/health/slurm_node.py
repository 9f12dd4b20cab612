"""A Slurm node: drained and undrained by ``scontrol``, with a reason that names the quarantine.

Slurm has no compare-and-set, so the node is read right before each change. What an administrator drained keeps its
reason and state.
"""

import re
import subprocess
from dataclasses import dataclass

from weft.hardware.health.ledger import Quarantine
from weft.hardware.health.node import Mark, Seen, Unreachable

TIMEOUT_S = 20
LONGEST = 180  # characters of a reason, which many tools cut
_MARK = re.compile(r"^weft (q-[0-9a-f]{8}):")


@dataclass(frozen=True)
class _State:
    flags: frozenset[str]
    reason: str
    allocated_cpus: int


class SlurmNode:
    """Args:
    name: the node's name in Slurm.
    scontrol: the command.
    """

    def __init__(self, name: str, scontrol: str = "scontrol"):
        self.name, self.scontrol = name, scontrol

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self.scontrol, *arguments],
                capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, errors="replace",
            )  # fmt: skip
        except FileNotFoundError as error:
            raise Unreachable(f"{self.scontrol} is not on PATH: install slurm-client on this node") from error
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"{self.scontrol} does not answer within {TIMEOUT_S} s") from error
        if done.returncode:
            raise Unreachable(f"scontrol {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _state(self) -> _State:
        text = self._run("--oneliner", "show", "node", self.name)
        flags = re.search(r"\bState=(\S+)", text)
        if not flags:
            raise Unreachable(f"scontrol show node {self.name} says no state: {text.strip()[:200]}")
        reason = re.search(r"\bReason=(.*?)(?: \[[^\]@]*@[^\]]*\]|$)", text.strip())
        cpus = re.search(r"\bCPUAlloc=(\d+)", text)
        # A flag may end in * (does not respond), ~ or # (power), $ (maintenance).
        states = frozenset(flag.rstrip("*~#!%$@^-") for flag in flags[1].split("+"))
        return _State(states, reason[1] if reason else "", int(cpus[1]) if cpus else 0)

    def read(self) -> Seen:
        state = self._state()
        mark = _MARK.match(state.reason)
        return Seen(Mark(mark[1], "DRAIN" in state.flags, state) if mark else None)

    def quarantine(self, quarantine: Quarantine, over: Mark | None) -> str:
        state = self._state()
        reason = f"weft {quarantine.reason()}".replace('"', "'")[:LONGEST]
        if state.reason == reason and "DRAIN" in state.flags:
            return ""
        mark = _MARK.match(state.reason)
        if not mark and ("DRAIN" in state.flags or (state.reason and "DOWN" in state.flags)):
            return f"the node is {'+'.join(sorted(state.flags))} with another's reason, which is left: {state.reason}"
        self._run("update", f"NodeName={self.name}", "State=DRAIN", f"Reason={reason}")
        return ""

    def release(self, mark: Mark) -> None:
        state = self._state()
        found = _MARK.match(state.reason)
        if not found or found[1] != mark.id or "DRAIN" not in state.flags:
            return
        # UNDRAIN leaves a node down that is down for another reason.
        self._run("update", f"NodeName={self.name}", "State=UNDRAIN" if "DOWN" in state.flags else "State=RESUME")

    def forget(self, mark: Mark) -> None:
        """The reason of a node that is in service."""
        state = self._state()
        if state.reason and _MARK.match(state.reason) and "DRAIN" not in state.flags:
            self._run("update", f"NodeName={self.name}", "Reason=")

    def drain(self, quarantine: Quarantine) -> tuple[bool, str]:
        """Slurm lets running jobs end."""
        state = self._state()
        return (False, "jobs run on it still") if state.allocated_cpus else (True, "")

    def healthy(self) -> None:
        """Slurm shows no health beside the reason."""
