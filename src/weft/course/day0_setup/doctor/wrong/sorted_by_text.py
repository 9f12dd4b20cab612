# rejected at: right
# Sorted by the fix: the report's order is lost.
import os


CPUS = os.cpu_count()


def to_do(report):
    found = [(f["status"], f["fix"]) for f in report["findings"] if f["status"] != "pass" and f["fix"]]
    return [fix for _, fix in sorted(found)]
