"""OpenAI-compatible HTTP, native generation, cache control, health and metrics of an engine."""

from __future__ import annotations

from phloem.server.app import create_app
from phloem.server.lifecycle import Server, bind, serve, serve_async
from phloem.server.settings import ServerSettings

__all__ = ["Server", "ServerSettings", "bind", "create_app", "serve", "serve_async"]
