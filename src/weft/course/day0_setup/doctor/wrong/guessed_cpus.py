# rejected at: right
# A number that no machine has.
import os


CPUS = -1


def to_do(report):
    return [
        finding["fix"]
        for status in ("fail", "warn")
        for finding in report["findings"]
        if finding["status"] == status and finding["fix"]
    ]
