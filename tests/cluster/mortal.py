"""Tasks whose processes die. Apart from their tests, so that the processes import little."""

import importlib
import os
import signal
import time


def dies_at_worst(shared, task):
    """``weft.cluster.compare``'s own task, but for the placement ``worst``."""
    if shared[2][task[0]].placement == "worst":
        os.kill(os.getpid(), signal.SIGKILL)
    return importlib.import_module("weft.cluster.comparison")._measure(shared, task)


def echo(shared, task):
    if task == "raise":
        raise ValueError("no")
    if task == "exit":
        os._exit(7)
    return shared + task


def sleeps(folder, task):
    """Says by a file that it runs, and sleeps."""
    (folder / str(os.getpid())).touch()
    time.sleep(600)
