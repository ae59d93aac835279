"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phloem.core.errors import EngineDead, Overloaded, PhloemError, UserError

__all__ = [
    "PayloadTooLarge",
    "RequestFailed",
    "error_bytes",
    "internal_error",
    "on_engine_dead",
    "on_http_exception",
    "on_request_failed",
    "on_user_error",
]


class PayloadTooLarge(UserError):
    """A body over the limit; nothing of it was parsed."""

    status = 413


class RequestFailed(PhloemError):
    """The engine gave up on this one request (say, its logits were NaN); others go on."""


def error_bytes(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON document of one error."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def describe(error: PhloemError) -> tuple[int, bytes]:
    """HTTP status and document of an error that was raised on purpose."""
    if isinstance(error, UserError):
        body = error_bytes(error.message, error.kind, param=error.param, code=error.code)
        return error.status, body
    if isinstance(error, EngineDead):
        message = f"the engine ended and answers nothing more: {error}"
        return 503, error_bytes(message, "server_error", code="engine_dead")
    return 500, error_bytes(str(error), "server_error", code="request_failed")


def json_response(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def on_user_error(_: Request, error: Exception) -> Response:
    """Turn a UserError into its response."""
    assert isinstance(error, UserError), f"registered for UserError, got {type(error)}"
    headers = {"retry-after": "1"} if isinstance(error, Overloaded) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(*describe(error), headers)


async def on_engine_dead(_: Request, error: Exception) -> Response:
    """503: this server will not recover by itself."""
    assert isinstance(error, EngineDead), f"registered for EngineDead, got {type(error)}"
    return json_response(*describe(error))


async def on_request_failed(_: Request, error: Exception) -> Response:
    """500 for one request."""
    assert isinstance(error, RequestFailed), f"registered for RequestFailed, got {type(error)}"
    return json_response(*describe(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths (404) and methods (405)."""
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {type(error)}"
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        message, kind = f"no such endpoint: {where}", "not_found_error"
    elif error.status_code == 405:
        message, kind = f"method not allowed: {where}", "invalid_request_error"
    else:
        message, kind = str(error.detail), "invalid_request_error"
    body = error_bytes(message, kind)
    return json_response(error.status_code, body, dict(error.headers or {}))


def internal_error(request_id: str) -> bytes:
    """The document of an unexpected failure: the id leads to the server's log, nothing leaks."""
    message = f"internal error; the server's log tells more under request id {request_id}"
    return error_bytes(message, "server_error", code="internal_error")
