"""uvicorn's server, which answers the requests that its end cuts off."""

import asyncio
import socket
from typing import Any

import uvicorn

from weft.inference.server.driver import Driver
from weft.inference.server.worker import STOPPING

ANSWER_S = 2.0  # for the errors to reach the clients


class Server(uvicorn.Server):
    """Serves ``application``. SIGTERM and Ctrl-C let requests end for ``seconds``; those that do not end by ``ANSWER_S`` before
    get an error, where uvicorn would cut their connections and log a traceback of each."""

    def __init__(self, application: Any, driver: Driver, seconds: int = 30):
        super().__init__(
            uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=seconds, lifespan="on")
        )
        self.driver, self.seconds = driver, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        last = asyncio.get_running_loop().call_later(self.seconds - ANSWER_S, self.driver.lose, STOPPING)
        try:
            await super().shutdown(sockets)
        finally:
            last.cancel()
