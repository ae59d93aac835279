"""The tokenizer of a Hugging Face folder: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phloem.core.errors import ConfigError
from phloem.engine.chat_template import ChatTemplate
from phloem.engine.tokenizer import ModelTokenizer

__all__ = ["load_hf_tokenizer"]


def _read_json(path: Path) -> dict[str, Any]:
    """An object, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` ... as text; each may be a string or an added-token object."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]


def load_hf_tokenizer(folder: Path) -> ModelTokenizer:
    """Load it. Raises ConfigError for a folder without tokenizer.json, or with a broken one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json (other tokenizer files are not read)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every kind of broken file
        raise ConfigError(f"{file} cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    eos = _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    eos = eos or _ids(_read_json(folder / "config.json").get("eos_token_id"))
    if "eos_token" in special:
        eos += _ids(tokenizer.token_to_id(special["eos_token"]))
    source = _template_source(folder, config)
    template = None if source is None else ChatTemplate(source, special)
    return ModelTokenizer(tokenizer, eos_ids=tuple(dict.fromkeys(eos)), template=template)
