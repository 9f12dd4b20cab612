# rejected at: right
# Empty texts are no fixes.
import os


CPUS = os.cpu_count()


def to_do(report):
    return [f["fix"] for s in ("fail", "warn") for f in report["findings"] if f["status"] == s]
