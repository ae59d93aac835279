"""What operators and gateways ask: models, health, metrics, load, cache control."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import phloem
from phloem.core.errors import Overloaded
from phloem.core.stats import EngineStats
from phloem.engine.api import Health, ModelCard
from phloem.server.context import Context, context_of

__all__ = [
    "flush_cache",
    "health",
    "list_models",
    "load",
    "loads",
    "metrics",
    "model_info",
    "ready",
    "server_info",
    "show_model",
    "version",
]


def _probe(health: Health, good: bool) -> Response:
    return JSONResponse(asdict(health), 200 if good else 503, {"cache-control": "no-store"})


async def health(http: Request) -> Response:
    """200 while the engine makes progress (or idles), from shared memory, without a message."""
    state = context_of(http).engine.health()
    return _probe(state, state.alive)


async def ready(http: Request) -> Response:
    """200 while requests are accepted: not before the model is loaded, not while draining."""
    state = context_of(http).engine.health()
    return _probe(state, state.alive and state.ready)


async def metrics(http: Request) -> Response:
    """Prometheus text format 0.0.4."""
    text = await context_of(http).metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4")


def _model(card: ModelCard, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "phloem",
        "root": card.path,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


async def list_models(http: Request) -> Response:
    """Every name under which the model is served."""
    context = context_of(http)
    models = [_model(context.card, name) for name in context.names]
    return JSONResponse({"object": "list", "data": models})


async def show_model(http: Request, model_id: str) -> Response:
    """One of them."""
    context = context_of(http)
    name = context.model_name(model_id)
    return JSONResponse(_model(context.card, name))


async def version(_: Request) -> Response:
    """The package's version."""
    return JSONResponse({"version": phloem.__version__})


async def model_info(http: Request) -> Response:
    """What is served, under the names that SGLang's clients read, and our own."""
    context = context_of(http)
    card = context.card
    legacy = {"model_path": card.path, "tokenizer_path": card.path, "is_generation": True}
    return JSONResponse({**legacy, **asdict(card), "served_model_names": context.names})


async def _stats(context: Context) -> EngineStats:
    stats = await context.metrics.stats()
    if stats is None:
        raise Overloaded("the engine has given no figures yet")
    return stats


async def server_info(http: Request) -> Response:
    """Version, model, geometry, health and counters in one document."""
    context = context_of(http)
    stats = await context.metrics.stats()
    counters: dict[str, Any] | None = None
    if stats is not None:
        counters = {**asdict(stats), "finished_total": dict(stats.finished_total)}
    return JSONResponse(
        {
            "version": phloem.__version__,
            "served_model_names": context.names,
            "model": asdict(context.card),
            "capacity_tokens": context.card.num_pages * context.card.page_size,
            "health": asdict(context.engine.health()),
            "open_requests": len(context.runs),
            "stats": counters,
        }
    )


async def load(http: Request) -> Response:
    """Running and queued requests in one number."""
    stats = await _stats(context_of(http))
    total = stats.running + stats.queued
    return JSONResponse({"server_load": total, "running": stats.running, "queued": stats.queued})


async def loads(http: Request) -> Response:
    """The same as gateways read it: one entry for each data-parallel rank (one here)."""
    stats = await _stats(context_of(http))
    cache = stats.cache
    entry = {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.queued,
        "num_total_reqs": stats.running + stats.queued,
        "num_used_tokens": cache.locked_pages * cache.page_size,
        "max_total_num_tokens": cache.total_pages * cache.page_size,
        "token_usage": cache.locked_pages / max(1, cache.total_pages),
    }
    return JSONResponse({"version": phloem.__version__, "dp_rank_count": 1, "loads": [entry]})


async def flush_cache(http: Request) -> Response:
    """Forget every page that no running request holds; the rest is told."""
    locked = await context_of(http).engine.flush_cache()
    return JSONResponse({"success": True, "locked_pages": locked})
