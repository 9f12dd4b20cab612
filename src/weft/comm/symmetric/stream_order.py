"""Calls that share symmetric memory, put in order: two at once could overwrite each other's data, or wait for ever."""

from typing import Any

import torch


class StreamOrder:
    """Of the calls of one object. A call from another stream waits for the one before."""

    def __init__(self, what: str):
        self.what = what
        self._stream: Any = None  # of the last call, and of the last one in a CUDA graph
        self._captured: Any = None

    def enter(self) -> None:
        """Before each call.

        Raises:
            RuntimeError: calls on two streams of one CUDA graph, whose order cannot be seen.
        """
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            if self._captured not in (None, stream):
                raise RuntimeError(f"symmetric {self.what} on two streams of a CUDA graph; make them on one")
            self._captured = stream
            return
        if self._stream not in (None, stream):
            stream.wait_stream(self._stream)
        self._stream, self._captured = stream, None
