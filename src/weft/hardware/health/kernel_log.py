"""Faults in the kernel's log, however a line was printed: /dev/kmsg, dmesg (also -T), journalctl, syslog.

The forms are those of NVIDIA's driver (Xid, SXid, "fallen off the bus" with and without a code, RmInitAdapter, API mismatch),
of PCIe error reporting (where the line names the GPU itself: a port may have a network card below it), and of the memory
controller.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from weft.hardware.health.event import Event, pci_address

LONGEST = 2000  # characters of a line that are read

# The kernel's own lines: bare, with dmesg's stamps, or of the sender "kernel" in syslog and journalctl. What another program
# logs is not believed: any user could name a fault.
_HEAD = re.compile(
    r"(?:<\d+>|(?:\d{4}-\d\d-\d\d[T ]\S+|\w{3} +\d+ \d\d:\d\d:\d\d) \S+ kernel: ?)?(?:\s*\[[^\]]*\])*\s*"
    r"(?=NVRM:|nvidia|EDAC |mce:|Memory failure:)"
)
_XID = re.compile(r"NVRM: Xid \(((?:PCI:)?[0-9a-fA-F:.]+)[^)]*\): (\d{1,9})\b(?:, (.*))?")
_PROCESS = re.compile(r"pid=(?:'?(\d{1,10})\b'?|'?<unknown>'?), (?:name=([^,]*), )?")
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]+)\s+(?P<severity>Nonfatal|Fatal)\s+XC\d\s+i\d+\s+Link\s+(?P<link>-?\d{1,9})\b"
    r"\s+\((?P<intrinfo>0x[0-9a-fA-F]{1,16})\b(?:\s+(?P<status>0x[0-9a-fA-F]{1,16})\b)?"
)
_RECOVERY = re.compile(r"recovery action changed from 0x([0-9a-fA-F]+) \([^)]*\) to 0x([0-9a-fA-F]+)")
_CAUSE = re.compile(r"caused by previous Xid (\d+)")
_TPC = re.compile(r"GPC (\d+), TPC (\d+)")
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(((?:PCI:)?[0-9a-fA-F:.]+)\): (\d{1,9}), (.*)")
_LOST = re.compile(r"NVRM:\s+GPU (?:at )?((?:PCI:)?[0-9a-fA-F:.]+?)(?:: GPU-\S+)?:? (?:GPU )?has fallen off the bus")
_LOST_GPU = re.compile(r"NVRM:\s+The NVIDIA GPU ([0-9a-fA-F:.]+)")
_LOST_END = re.compile(r"NVRM:.*fallen off the bus and is not responding")
_PCI = r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])"
_AER = re.compile(
    rf"nvidia {_PCI}: (?:AER: )?PCIe Bus Error: severity=(Correct\w+|Uncorrect\w+ \((?:Non-)?Fatal\))", re.IGNORECASE
)
_AER_DEAD = re.compile(rf"nvidia {_PCI}: AER: can't recover")
_INIT = re.compile(rf"NVRM: GPU {_PCI}: RmInitAdapter failed")
_MISMATCH = re.compile(r"NVRM: API mismatch")
_HOST_MEMORY = re.compile(
    r"EDAC MC\d+: \d+ UE |mce: .*Uncorrected .*memory|Memory failure: 0x[0-9a-f]+: .*(?:Failed|recovery action)"
)


class Parser:
    """Reads lines in order; a fault may be spread over a few of them."""

    def __init__(self, source: str = "kernel-log"):
        self.source = source
        self._lost, self._lines_left = "", 0

    def parse(self, line: str, time: float = 0.0, id: str | None = None) -> Event | None:
        """The fault in a line, or None.

        Args:
            time: when, in seconds since 1970; 0 takes it from the line, where it says.
            id: of this line, for duplicates; by default one for each distinct text.
        """
        text = line.strip()[:LONGEST]
        found = self._fault(text)
        if found is None:
            return None
        kind, address, details = found
        gpu = pci_address(address)
        at = time or stamp(text) or 0.0
        return Event(kind, gpu, at, self.source, text, details, **({"id": id} if id else {}))

    def _fault(self, line: str) -> tuple[str, str, dict] | None:
        head = _HEAD.match(line)
        self._lines_left -= 1
        if not head:
            return None
        text = line[head.end() :]
        if found := _XID.match(text):
            return _xid(found)
        if found := _SXID.match(text):
            # SXids name the switch, which is no GPU: the whole node. A severity is in the text: "…, Fatal, Link 32 …".
            rest = found[3]
            fatal = re.match(r"(?:Severity \d+ )?(?:Engine.*? )?Fatal", rest) is not None or ", Fatal" in rest
            return "sxid-fatal" if fatal else "sxid", "", {"sxid": int(found[2]), "switch": pci_address(found[1])}
        if found := _LOST.match(text):
            return "xid:79", found[1], {"without_code": True}
        if found := _LOST_GPU.match(text):
            self._lost, self._lines_left = found[1], 4
        if self._lost and self._lines_left >= 0 and _LOST_END.match(text):
            lost, self._lost = self._lost, ""
            return "xid:79", lost, {"without_code": True}
        if found := _AER.match(text):
            severity = found[2].lower()
            kind = "pcie-corrected" if severity.startswith("corr") else "pcie-uncorrected"
            return ("pcie-fatal" if "(fatal)" in severity else kind), found[1], {}
        if found := _AER_DEAD.match(text):
            return "pcie-fatal", found[1], {}
        if found := _INIT.match(text):
            return "driver-init-failed", found[1], {}
        if _MISMATCH.match(text):
            return "driver-mismatch", "", {}
        if _HOST_MEMORY.match(text):
            return "host-memory", "", {}
        return None


def _xid(found: re.Match[str]) -> tuple[str, str, dict]:
    code, rest = int(found[2]), found[3] or ""
    details: dict = {}
    if process := _PROCESS.match(rest):
        if process[1]:
            details["pid"] = int(process[1])
        if process[2] and "<unknown>" not in process[2]:
            details["process"] = process[2]
    if link := _NVLINK5.search(rest):
        intrinfo = int(link["intrinfo"], 16)
        details |= {
            "unit": link["unit"], "severity": link["severity"], "link": int(link["link"]), "intrinfo": intrinfo,
            "sub_code": intrinfo >> 20 & 0x3F, "status": int(link["status"] or "0", 16),
        }  # fmt: skip
    if recovery := _RECOVERY.search(rest):
        details |= {"recovery_before": int(recovery[1], 16), "recovery": int(recovery[2], 16)}
    if cause := _CAUSE.search(rest):
        details["caused_by"] = int(cause[1])
    if tpc := _TPC.search(rest):
        details["location"] = f"GPC {tpc[1]}, TPC {tpc[2]}"
    return f"xid:{code}", found[1], details


# ---- times

_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_DMESG_T = re.compile(r"\[(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\]")
_JOURNAL = re.compile(r"(?:^|\s)(\w{3} +\d{1,2} \d\d:\d\d:\d\d) ")
_SINCE_BOOT = re.compile(r"\[ *(\d+\.\d+)\]")


def stamp(text: str, boot: float = 0.0, year: int | None = None) -> float:
    """When a line says that it was printed, in seconds since 1970 (since boot where ``boot`` is 0); 0 where it does not say.
    A time without a zone is local; one without a year is of ``year``, or of the past year."""
    try:
        if found := _ISO.search(text):
            return datetime.fromisoformat(_colon(found[0].replace(",", ".").replace("Z", "+00:00"))).timestamp()
        if found := _DMESG_T.search(text):
            return datetime.strptime(found[1], "%a %b %d %H:%M:%S %Y").timestamp()
        if found := _SINCE_BOOT.search(text):
            return boot + float(found[1])
        if found := _JOURNAL.search(text):
            now = datetime.now()
            at = datetime.strptime(f"{year or now.year} {found[1]}", "%Y %b %d %H:%M:%S")
            if not year and at > now:
                at = at.replace(year=now.year - 1)
            return at.timestamp()
    except ValueError:  # 31 February
        return 0.0
    return 0.0


def _colon(text: str) -> str:
    """Python 3.10 reads neither +0000 nor fractions of other lengths than 3 and 6."""
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)
    return re.sub(r"\.(\d+)", lambda m: "." + m[1][:6].ljust(6, "0"), text)


def scan(lines: Iterable[str]) -> Iterator[Event]:
    """The faults in lines of a log, in order. A line of /dev/kmsg (``4,1234,5678,-;NVRM: …``) also says its number."""
    parser, last = Parser(), 0.001
    for number, line in enumerate(lines):
        record = re.match(r"(\d{1,9}),(\d{1,20}),(\d{1,20}),[^;]*;(.*)", line)
        if record:
            event = parser.parse(record[4], int(record[3]) / 1e6, f"kmsg-{record[2]}")
        else:
            event = parser.parse(line, id=f"line-{number}")
        if event:
            last = event.time or last  # a line that says no time is of the time of the one before it
            yield replace(event, time=last)
