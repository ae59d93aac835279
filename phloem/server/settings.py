"""What the HTTP server may be told."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP layer alone; what concerns the engine is the engine's."""

    served_model_names: tuple[str, ...] = ()  # () means: the model card's name
    api_key: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    max_prompts: int = 256  # prompts of one /v1/completions or /generate request
    stats_timeout_s: float = 0.5  # after this, /metrics shows the last snapshot and its age

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key.isascii() and key.strip() == key != ""):
            raise ConfigError("the API key must be ASCII text without spaces around it")
        if any(not name for name in self.served_model_names):
            raise ConfigError("a served model name is empty")
        for name in ("max_body_bytes", "max_prompts", "stats_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
