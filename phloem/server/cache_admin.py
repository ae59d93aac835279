"""What operators do to a running engine's cache and weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phloem.config.units import parse_bytes
from phloem.core.errors import BadRequest, ConfigError
from phloem.engine.commands import (
    AttachStorage,
    ClearCache,
    DetachStorage,
    ListCache,
    ListDecisions,
    ListRemote,
    UpdateWeights,
    VerifyCache,
)
from phloem.server.body import parse_body, read_json
from phloem.server.context import Context, context_of
from phloem.server.fields import ClearCacheBody, StorageBody, UpdateWeightsBody

__all__ = [
    "attach_storage",
    "cache_stats",
    "clear_cache",
    "detach_storage",
    "list_cache",
    "list_decisions",
    "list_remote",
    "update_weights",
    "verify_cache",
]

MAX_LISTED = 1000


async def cache_stats(http: Request) -> Response:
    """Pages, hits and transfers of every tier."""
    stats = await context_of(http).engine.stats()
    tiers = None if stats.tiers is None else _plain(asdict(stats.tiers))
    cache = asdict(stats.cache)
    if cache["replicas"] is not None:
        cache["replicas"] = _plain(cache["replicas"])
    return JSONResponse(
        {
            "cache": cache,
            "cached_tokens": asdict(stats.cached_tokens_total),
            "prompt_tokens": stats.prompt_tokens_total,
            "tiers": tiers,
        }
    )


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Pairs of (name, count) as objects."""
    return {
        name: dict(value) if name.endswith("_total") and isinstance(value, tuple) else value
        for name, value in facts.items()
    }


async def list_cache(http: Request) -> Response:
    """The largest cached prefixes, each with the text it begins with (?limit=N)."""
    context = context_of(http)
    limit = _limit(http.query_params.get("limit", "20"))
    result = await context.engine.operate(ListCache(limit))
    for row in result["prefixes"]:
        row["text"] = _text(context, row["head"])
    return JSONResponse(result)


async def list_decisions(http: Request) -> Response:
    """Why the newest requests' pages came from where they came (?request_id=ID, ?limit=N)."""
    request_id = http.query_params.get("request_id")
    if request_id is not None:  # an answer's id is taken as well
        request_id = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    limit = _limit(http.query_params.get("limit", "20"))
    command = ListDecisions(limit, request_id)
    return JSONResponse(await context_of(http).engine.operate(command))


async def list_remote(http: Request) -> Response:
    """How the newest steps read pages of other ranks, and what was expected of it (?limit=N)."""
    limit = _limit(http.query_params.get("limit", "20"))
    return JSONResponse(await context_of(http).engine.operate(ListRemote(limit)))


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LISTED:
        raise BadRequest(f"limit must be from 1 to {MAX_LISTED}, got {text!r:.40}", param="limit")
    return int(text)


def _text(context: Context, tokens: list[int]) -> str:
    known = [token for token in tokens if 0 <= token < context.engine.tokenizer.vocab_size]
    return context.engine.tokenizer.decode(known, skip_special_tokens=False)


async def verify_cache(http: Request) -> Response:
    """Check every invariant of tree, pools and locks."""
    return JSONResponse(await context_of(http).engine.operate(VerifyCache()))


async def clear_cache(http: Request) -> Response:
    """Forget what no running request holds; {"storage": true}: the storage directory as well."""
    context = context_of(http)
    body = parse_body(ClearCacheBody, await _fields(http, context))
    return JSONResponse(await context.engine.operate(ClearCache(body.storage)))


async def attach_storage(http: Request) -> Response:
    """{"directory": DIR, "size": "20GB"}: keep pages there from now on, while requests run."""
    context = context_of(http)
    body = parse_body(StorageBody, await _fields(http, context))
    try:
        size = parse_bytes(body.size)
    except ConfigError as error:
        raise BadRequest(str(error), param="size") from error
    return JSONResponse(await context.engine.operate(AttachStorage(body.directory, size)))


async def detach_storage(http: Request) -> Response:
    """Stop using the storage directory; its pages stay there."""
    return JSONResponse(await context_of(http).engine.operate(DetachStorage()))


async def update_weights(http: Request) -> Response:
    """{"model_path": PATH}: requests that came before keep the old weights, later ones wait."""
    context = context_of(http)
    body = parse_body(UpdateWeightsBody, await _fields(http, context))
    result = await context.engine.operate(UpdateWeights(body.model_path))
    return JSONResponse({"success": True, "message": f"serving {body.model_path}", **result})


async def _fields(http: Request, context: Context) -> dict[str, Any]:
    """The body's fields; a request without a body has none."""
    has_body = "transfer-encoding" in http.headers or http.headers.get("content-length", "0") != "0"
    if not has_body:
        return {}
    return await read_json(http, context.settings.max_body_bytes)
