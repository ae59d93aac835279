"""Who may share stored pages with whom: the facts of this engine that go into storage keys."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

from phloem.config.checkpoint import CheckpointKind, checkpoint_kind
from phloem.config.model import ModelConfig
from phloem.kv.keys import Fact, KeyFacts, weights_identity
from phloem.kv.layout import PageLayout

__all__ = ["key_facts", "model_facts", "weight_files"]

# They change no K or V: ids that end an answer, lengths, names, and the output head.
_IRRELEVANT = frozenset({"name", "eos_ids", "bos_id", "max_position", "tie_embeddings", "dtype"})


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of the checkpoint at `path`."""
    if checkpoint_kind(path) is CheckpointKind.GGUF:
        return [path]
    return sorted(path.glob("*.safetensors"))


def model_facts(config: ModelConfig) -> dict[str, Fact]:
    """Everything of a model's configuration but what is known to be irrelevant to its KV."""
    facts = _plain(dataclasses.asdict(config))
    return {name: value for name, value in facts.items() if name not in _IRRELEVANT}


def _plain(value: Any) -> Any:
    """Enums by their values, tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def key_facts(
    path: Path,
    config: ModelConfig,
    layout: PageLayout,
    *,
    window: PageLayout | None = None,
    weight_quantisation: str,
) -> KeyFacts:
    """The facts of an engine that serves the checkpoint at `path`. Reads samples of its files.

    `window`: the layout of the window component's pages, where some layers have a window.
    `weight_quantisation` has no default: another one gives other KV for the same tokens.
    """
    return KeyFacts(
        weights=weights_identity(weight_files(path)),
        weight_quantisation=weight_quantisation,
        model=model_facts(config),
        layout=layout,
        window=window,
    )
