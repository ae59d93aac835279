"""What every endpoint needs, made once."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from phloem.core.errors import NotFound
from phloem.engine.api import EngineClient, ModelCard
from phloem.server.metrics import Metrics
from phloem.server.prompts import PromptReader
from phloem.server.runs import Runs
from phloem.server.settings import ServerSettings

__all__ = ["Context", "context_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The engine and what the server keeps beside it."""

    engine: EngineClient
    settings: ServerSettings
    metrics: Metrics
    runs: Runs
    prompts: PromptReader

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served; the first is the default."""
        return self.settings.served_model_names or (self.card.name,)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises NotFound for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            raise NotFound(
                f"the model {asked!r:.100} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return asked


def make_context(engine: EngineClient, settings: ServerSettings) -> Context:
    """Wire the parts together."""
    metrics = Metrics(engine, timeout_s=settings.stats_timeout_s)
    reader = PromptReader(engine.tokenizer, engine.card.vocab_size, settings.max_prompts)
    return Context(
        engine=engine,
        settings=settings,
        metrics=metrics,
        runs=Runs(engine, metrics),
        prompts=reader,
    )


def context_of(request: Request) -> Context:
    """The app's context."""
    context = request.app.state.context
    assert isinstance(context, Context), "create_app sets it"
    return context
