"""One setting: a dataclass field that knows its doc line, its limits and its other names.

Types that a setting may have: str, int, float, bool, a Literal of strings, and `T | None`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from phloem.core.errors import ConfigError

__all__ = ["Setting", "did_you_mean", "setting", "settings_of", "validate"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What flags, YAML keys, help and checks need to know of one field."""

    name: str
    kind: type  # str, int, float or bool
    doc: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # other names of the flag, with a foreign engine's spelling
    spellings: Mapping[str, str] = field(default_factory=dict)  # other words for a choice
    positional: bool = False
    secret: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def keys(self) -> tuple[str, ...]:
        """Every name under which a YAML file may give it, with underscores."""
        return (self.name, *(alias.replace("-", "_") for alias in self.aliases))

    def convert(self, value: object) -> Any:
        """`value` (from YAML or the command line) as the field's type. Raises ConfigError."""
        if value is None and self.optional:
            return None
        if self.kind is bool:
            return self._convert_bool(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(value)
        if self.kind is str:
            return self._convert_str(value)
        return self._convert_number(value)

    def error(self, value: object) -> ConfigError:
        """The one line that says what was expected instead of `value`."""
        text = f"{self.flag} must be {self._expected()}, got {value!r}"
        if self.choices and isinstance(value, str):
            text += did_you_mean(value, self.choices)
        return ConfigError(text)

    def check(self, value: Any) -> None:
        """Raise ConfigError if a value of the right type is out of range."""
        if value is None and self.optional:
            return
        if self.choices and value not in self.choices:
            raise self.error(value)
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            raise self.error(value)
        if self.kind in (int, float) and not self._in_range(value):
            raise self.error(value)

    def _in_range(self, value: Any) -> bool:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return math.isfinite(value) and low <= value <= high

    def _convert_bool(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise self.error(value)

    def _convert_str(self, value: str | int | float) -> str:
        text = str(value)
        text = self.spellings.get(text, text)
        if self.choices and text not in self.choices:
            raise self.error(value)
        return text

    def _convert_number(self, value: str | int | float) -> int | float:
        if self.kind is int and isinstance(value, float):
            raise self.error(value)
        try:
            return cast("int | float", self.kind(value))
        except ValueError:
            raise self.error(value) from None

    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        text = noun[self.kind]
        if self.low is not None and self.high is not None:
            return f"{text} from {self.low:g} to {self.high:g}"
        return text if self.low is None else f"{text}, at least {self.low:g}"


def setting(default: T, doc: str, **facts: Any) -> T:
    """A field with a doc line; `facts` are attributes of `Setting` (aliases, low, high, ...)."""
    return field(default=default, metadata={"setting": {"doc": doc, **facts}})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in order. Fields that are no settings are left out."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _make(item, hints[item.name])
        for item in dataclasses.fields(cls)
        if "setting" in item.metadata
    )


def validate(options: Any) -> None:
    """Check every setting of a dataclass instance against its type and limits."""
    for item in settings_of(type(options)):
        item.check(getattr(options, item.name))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _make(item: dataclasses.Field[Any], hint: Any) -> Setting:
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        optional = len(inner) < len(typing.get_args(hint))
        assert len(inner) == 1, f"{item.name}: a setting has one type, not {hint}"
        hint = inner[0]
    choices: tuple[str, ...] = ()
    if typing.get_origin(hint) is typing.Literal:
        choices, hint = typing.get_args(hint), str
    assert hint in (str, int, float, bool), f"{item.name}: no setting can be a {hint}"
    return Setting(
        name=item.name,
        kind=hint,
        default=item.default,
        optional=optional,
        choices=choices,
        **item.metadata["setting"],
    )
