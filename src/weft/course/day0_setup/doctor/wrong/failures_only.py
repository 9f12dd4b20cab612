# rejected at: right
# Warnings have fixes too.
import os


CPUS = os.cpu_count()


def to_do(report):
    return [f["fix"] for f in report["findings"] if f["status"] == "fail" and f["fix"]]
