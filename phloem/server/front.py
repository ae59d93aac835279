"""The outermost layer: request ids, the API key, and a last net for what nobody caught."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phloem.core.errors import BadRequest, Unauthorized
from phloem.server.errors import describe, internal_error

__all__ = ["Front", "RequestInfo", "info_of", "new_id"]

logger = logging.getLogger(__name__)

# Probes and scrapers have no key; what they see holds no prompt and no text.
OPEN_PATHS = frozenset(
    {"/", "/health", "/livez", "/readyz", "/ready", "/ping", "/metrics", "/version"}
)
_ID = re.compile(r"[\x21-\x7e]{1,256}")
_JSON_HEADER = (b"content-type", b"application/json")
_CLIENT_CLOSED = 499  # never sent; only counted


def new_id() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class RequestInfo:
    """One HTTP request's id, echoed as `x-request-id`."""

    request_id: str

    def adopt(self, request_id: str | None) -> str:
        """Take the id that the body names, if it names one; returns the id in force."""
        if request_id is None:
            return self.request_id
        if not _ID.fullmatch(request_id):
            raise BadRequest(
                "request_id must be 1 to 256 printable ASCII characters without spaces",
                param="request_id",
            )
        self.request_id = request_id
        return request_id


def info_of(scope: Scope) -> RequestInfo:
    """The info that `Front` attached to this request."""
    info = scope["phloem.info"]
    assert isinstance(info, RequestInfo), "Front must be the app's outermost middleware"
    return info


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


class Front:
    """Pure ASGI (no per-chunk cost beyond one call): see the module's docstring."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        info = RequestInfo(given if given and _ID.fullmatch(given) else new_id())
        scope["phloem.info"] = info
        status = 0

        async def tagged_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                pair = (b"x-request-id", info.request_id.encode())
                message["headers"] = [*message.get("headers", ()), pair]
            await send(message)

        try:
            self._authorize(scope)
            await self._app(scope, receive, tagged_send)
        except Unauthorized as error:
            code, body = describe(error)
            await _answer(tagged_send, code, body, (b"www-authenticate", b"Bearer"))
        except ClientDisconnect:
            status = status or _CLIENT_CLOSED
        except Exception:  # the last net of the process's entry point: log, answer, live on
            logger.exception("request %s: %r failed", info.request_id, scope["path"])
            if status:
                raise  # a response is under way: the server must cut the connection
            await _answer(tagged_send, 500, internal_error(info.request_id))
        finally:
            route = scope.get("route")
            endpoint = "unmatched" if route is None else str(route.path)
            self._count(endpoint, status or _CLIENT_CLOSED)

    def _authorize(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, token = (_header(scope, b"authorization") or "").partition(" ")
        good = hmac.compare_digest(token.strip().encode(), self._key)
        if scheme.lower() != "bearer" or not good:
            raise Unauthorized(
                "a valid API key is required: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [_JSON_HEADER, length, *headers]})
    await send({"type": "http.response.body", "body": body})
