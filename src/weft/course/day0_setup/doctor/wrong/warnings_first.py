# rejected at: right
# In the report's order, whatever the status.
import os


CPUS = os.cpu_count()


def to_do(report):
    return [f["fix"] for f in report["findings"] if f["status"] != "pass" and f["fix"]]
