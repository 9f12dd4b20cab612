"""Before the application: the API key and the size of bodies. Plain ASGI, since a body must be counted as it comes."""

import asyncio
import hmac
import json
import time
from typing import Any

OPEN = ("/health", "/metrics", "/openapi.json")  # what needs no key


class Guard:
    """Refuses requests without the key, but for health and metrics, and bodies that are too large.

    Args:
        app: the ASGI application.
        key: that clients send as ``Authorization: Bearer KEY``; None for no check.
        most_bytes: of a body.
        seconds: within which a body must have come, so that slow clients hold no connections.
    """

    def __init__(self, app: Any, key: str | None = None, most_bytes: int = 4 << 20, seconds: float = 60):
        self.app, self.most_bytes, self.seconds = app, most_bytes, seconds
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.key is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
                message = "Incorrect or missing API key; expected the header 'Authorization: Bearer KEY'"
                await refuse(send, 401, message, "invalid_request_error", "invalid_api_key")
                return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most_bytes:
            await self._too_large(send)
            return
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        # The body is read here whole, since it is small, so that an application never sees part of one.
        parts, size, end = [], 0, time.monotonic() + self.seconds
        while True:
            try:
                part: Any = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                why = f"The request's body did not come within {self.seconds:g} s"
                await refuse(send, 408, why, "invalid_request_error", "request_timeout")
                return
            if part["type"] == "http.disconnect":
                return
            parts.append(part.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                await self._too_large(send)
                return
            if not part.get("more_body"):
                break
        body: Any = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def again() -> Any:
            nonlocal body
            if body is None:
                return await receive()
            given, body = body, None
            return given

        await self.app(scope, again, send)

    async def _too_large(self, send: Any) -> None:
        message = f"The request's body is too large; expected at most {self.most_bytes} bytes"
        await refuse(send, 413, message, "invalid_request_error", "request_too_large")


def problem(message: str, kind: str, code: str | None = None, argument: str | None = None) -> dict[str, Any]:
    """An error as the OpenAI API writes it."""
    return {"error": {"message": message, "type": kind, "param": argument, "code": code}}


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 has no bytes for, as JSON's escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


async def refuse(send: Any, status: int, message: str, kind: str, code: str) -> None:
    body = encoded(problem(message, kind, code))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
