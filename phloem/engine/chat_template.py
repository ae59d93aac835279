"""Chat templates: the model's own Jinja source, rendered in a sandbox as Hugging Face does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from phloem.core.errors import BadRequest, ConfigError

__all__ = ["ChatTemplate"]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it only renders."""

    tags = {"generation"}  # noqa: RUF012  (the name and the type are Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not do.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables `bos_token`, `eos_token`, ..."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt's text. Raises BadRequest where the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # foreign code: whatever its expressions raise on odd messages
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
