"""From the bytes of a request to a checked body, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from phloem.core.errors import BadRequest, Unprocessable
from phloem.server.errors import PayloadTooLarge
from phloem.server.unsupported import refuse_unsupported

__all__ = ["parse_body", "read_json"]

M = TypeVar("M", bound=BaseModel)


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise PayloadTooLarge(f"the body has {declared} bytes, over the limit of {limit}")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise PayloadTooLarge(f"the body is over the limit of {limit} bytes")
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object, without its null fields.

    Raises PayloadTooLarge (413), Unprocessable (422: not JSON; NaN, bad UTF-8 and lone
    surrogates are not) or BadRequest (400: JSON, but no object).
    """
    data = await _read(request, limit)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unprocessable(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise Unprocessable("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {_name_of(value)}")
    return {name: field for name, field in value.items() if field is not None}


def _name_of(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def parse_body(model: type[M], fields: Mapping[str, Any]) -> M:
    """Check the fields of a body. Raises BadRequest that names the first wrong one."""
    refuse_unsupported(fields)
    nested = fields.get("sampling_params")
    if isinstance(nested, dict):
        refuse_unsupported(nested, "sampling_params.")
        kept = {name: field for name, field in nested.items() if field is not None}
        fields = {**fields, "sampling_params": kept}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _explain(first["loc"], first["msg"], first["type"], first["input"]) from None


def _explain(loc: tuple[int | str, ...], message: str, kind: str, value: object) -> BadRequest:
    steps = (f"[{p}]" if isinstance(p, int) else f".{p[:80]}" for p in loc)
    path = "".join(steps).removeprefix(".")
    if kind == "missing":
        return BadRequest(f"{path} is required", param=path, code="missing_parameter")
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = message[:1].lower() + message[1:]
    return BadRequest(f"{path}: {message}, got {shown}", param=path, code="invalid_value")
