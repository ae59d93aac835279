"""How a model wants to be sampled where a request does not say: what its makers recommend."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phloem.core.errors import BadRequest
from phloem.core.request import SamplingParams
from phloem.engine.api import SamplingDefaults

__all__ = ["sampling_defaults"]

# Its model card's example; at temperature 1 a model of this size talks nonsense.
_SMOLLM2 = SamplingDefaults(temperature=0.2, top_p=0.9)
_GENERATION_FILE = "generation_config.json"


def sampling_defaults(name: str, path: Path) -> SamplingDefaults:
    """From a checkpoint's generation_config.json, if it has one; else the API's own defaults.

    A value that cannot be is passed over: a broken recommendation must not keep a model from
    being served.
    """
    if name == "smollm2" and path.suffix == ".gguf":  # the packaged file, no folder of that name
        return _SMOLLM2
    file = path / _GENERATION_FILE
    if not file.is_file():
        return SamplingDefaults()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return SamplingDefaults()
    return _from_generation(raw if isinstance(raw, dict) else {})


def _from_generation(raw: dict[str, Any]) -> SamplingDefaults:
    if raw.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    chosen = asdict(SamplingDefaults())
    for key, plain in list(chosen.items()):
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        typed = type(plain)(value)
        try:
            SamplingParams(**{key: typed})
        except BadRequest:
            continue
        chosen[key] = typed
    return SamplingDefaults(**chosen)
