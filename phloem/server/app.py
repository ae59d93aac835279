"""The application: which path leads where."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import phloem
from phloem.core.errors import EngineDead, UserError
from phloem.engine.api import EngineClient
from phloem.server import admin, cache_admin, errors, fields, native, tokens
from phloem.server.chat import chat_completions
from phloem.server.completions import completions
from phloem.server.context import make_context
from phloem.server.front import Front
from phloem.server.page import page
from phloem.server.settings import ServerSettings

__all__ = ["create_app"]

Endpoint = Callable[..., Awaitable[Response]]

_POSTS: tuple[tuple[str, Endpoint, type[BaseModel]], ...] = (
    ("/v1/chat/completions", chat_completions, fields.ChatBody),
    ("/v1/completions", completions, fields.CompletionBody),
    ("/generate", native.generate, fields.GenerateBody),
    ("/abort_request", native.abort_request, fields.AbortBody),
    ("/tokenize", tokens.tokenize, fields.TokenizeBody),
    ("/v1/tokenize", tokens.tokenize, fields.TokenizeBody),
    ("/detokenize", tokens.detokenize, fields.DetokenizeBody),
    ("/v1/detokenize", tokens.detokenize, fields.DetokenizeBody),
    ("/cache/clear", cache_admin.clear_cache, fields.ClearCacheBody),
    ("/cache/storage", cache_admin.attach_storage, fields.StorageBody),
    ("/update_weights_from_disk", cache_admin.update_weights, fields.UpdateWeightsBody),
)
_PLAIN: tuple[tuple[str, Endpoint, tuple[str, ...]], ...] = (
    ("/", page, ("GET",)),
    ("/v1/models", admin.list_models, ("GET",)),
    ("/v1/models/{model_id:path}", admin.show_model, ("GET",)),
    ("/health", admin.health, ("GET", "HEAD")),
    ("/livez", admin.health, ("GET", "HEAD")),
    ("/ping", admin.health, ("GET", "HEAD")),
    ("/ready", admin.ready, ("GET", "HEAD")),
    ("/readyz", admin.ready, ("GET", "HEAD")),
    ("/metrics", admin.metrics, ("GET",)),
    ("/version", admin.version, ("GET",)),
    ("/server_info", admin.server_info, ("GET",)),
    ("/model_info", admin.model_info, ("GET",)),
    ("/load", admin.load, ("GET",)),
    ("/v1/loads", admin.loads, ("GET",)),
    ("/flush_cache", admin.flush_cache, ("GET", "POST")),
    ("/reset_prefix_cache", admin.flush_cache, ("POST",)),
    ("/cache/stats", cache_admin.cache_stats, ("GET",)),
    ("/cache/ls", cache_admin.list_cache, ("GET",)),
    ("/cache/decisions", cache_admin.list_decisions, ("GET",)),
    ("/cache/remote", cache_admin.list_remote, ("GET",)),
    ("/cache/verify", cache_admin.verify_cache, ("POST",)),
    ("/cache/storage", cache_admin.detach_storage, ("DELETE",)),
)


@functools.cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    # Bodies are read by hand (size limit, strict JSON), so the schema is told by hand too.
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    for name, field in schema.get("properties", {}).items():
        for option in (field, *field.get("anyOf", ())):
            reference = option.pop("$ref", None)
            if reference is not None:
                option.update(definitions[reference.rpartition("/")[2]])
        schema["properties"][name] = field
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def create_app(engine: EngineClient, settings: ServerSettings | None = None) -> FastAPI:
    """The HTTP face of an engine, which stays the caller's to close (`serve` does)."""
    settings = settings or ServerSettings()
    app = FastAPI(title="Phloem", version=phloem.__version__, redirect_slashes=False)
    context = make_context(engine, settings)
    app.state.context = context
    app.add_middleware(Front, api_key=settings.api_key, count=context.metrics.count_http)
    app.add_exception_handler(UserError, errors.on_user_error)
    app.add_exception_handler(EngineDead, errors.on_engine_dead)
    app.add_exception_handler(errors.RequestFailed, errors.on_request_failed)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    for path, endpoint, body in _POSTS:
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            openapi_extra=_schema_of(body),
            operation_id=path.strip("/").replace("/", "_"),
        )
    for path, endpoint, methods in _PLAIN:
        for method in methods:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app
