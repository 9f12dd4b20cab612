"""``python -m weft``. The doctor runs before anything is installed, with the standard library alone."""

import os
import signal
import sys
import threading
import time
from typing import Any

LONGEST_IMPORT_S = 5.0  # that an interruption waits for; a user's file may compute for hours while it is imported
_asked: list[float] = []  # when it came, and when it came again


def interrupt(number: int, frame: Any) -> None:
    """Raises KeyboardInterrupt when no import is in progress: PyTorch's goes on without NumPy where it comes in NumPy's."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    _asked.append(time.monotonic())
    if frame is None or _asked[-1] - _asked[0] > LONGEST_IMPORT_S:
        _asked.clear()
        raise KeyboardInterrupt
    again = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return _main()
    except KeyboardInterrupt:  # while modules are imported; later the command line says so itself
        sys.stderr.write("weft: interrupted\n")
        return 130


def _main() -> int:
    if sys.argv[1:2] == ["exporter"]:  # runs for months: without the other commands it takes half the memory
        from weft.hardware.telemetry import exporter

        return exporter.main(sys.argv[2:])
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if sys.argv[1:2] == ["doctor"]:
            from weft.hardware import doctor

            return doctor.main(sys.argv[2:])
        sys.stderr.write(
            f"weft's command line needs {error.name}, which is not installed: run `make setup`, or `pip install weft`.\n"
            "`python -m weft doctor` works without it.\n"
        )
        return 2
    from weft.cli import main as cli

    return cli()


if __name__ == "__main__":
    sys.exit(main())
