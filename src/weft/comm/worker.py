"""A rank that ``weft comm`` started: ``python -m weft.comm.worker``."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent(how: int) -> None:
    """Asks the system to send this process a signal when the one that started it ends, however it does: no orphans."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)


def main() -> int:
    end_with_parent(signal.SIGKILL)
    from weft.comm import collectives, ranks
    from weft.comm.checked import CollectiveFailed
    from weft.comm.run import run
    from weft.comm.settings import Settings

    given = json.loads(os.environ[ranks.STARTED_BY_WEFT])
    who = ranks.started()
    if who is None:
        raise RuntimeError("weft.comm.worker is started by weft comm")
    records = 0

    def about(control: Any, found: dict[str, Any]) -> None:
        control.store.set("about", json.dumps(found))

    def emit(control: Any, record: dict[str, Any]) -> None:
        nonlocal records
        control.store.set(f"record/{records}", json.dumps(record))
        records += 1

    try:
        found = collectives.find(given["names"])
        run(Settings(**given["settings"]), found, given["backend"], who, about, emit)
    except Exception as error:
        expected = isinstance(error, CollectiveFailed | ValueError | ImportError | MemoryError)
        sys.stderr.write(f"weft: {error}\n" if expected else traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)  # a backend's own threads may wait for ranks that are gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
