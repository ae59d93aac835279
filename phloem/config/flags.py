"""Command-line flags derived from dataclasses of settings; errors are one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from phloem.config.setting import Setting, did_you_mean, settings_of

__all__ = ["FlagParser", "add_settings", "build_settings", "given_settings"]

# Marks a setting that came from the command line among argparse's own names.
_PREFIX = "setting:"


class FlagParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors name the nearest flag that exists."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, or leave with one line and exit code 2."""
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            self.refuse(extra[0])
        return found

    def refuse(self, word: str) -> NoReturn:
        """Leave because of an argument that nobody knows."""
        flag = word.split("=", 1)[0]
        if not flag.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        self.error(f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2; the usage stays in --help."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def add_settings(
    parser: argparse.ArgumentParser, cls: type, *, title: str, required: Sequence[str] = ()
) -> None:
    """Add one group of flags: a flag for each setting of the dataclass `cls`."""
    group = parser.add_argument_group(title, (cls.__doc__ or "").split("\n")[0])
    for item in settings_of(cls):
        if item.positional:
            _add_positional(group, item, required=item.name in required)
        else:
            _add_flag(group, item)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings named on the command line, unconverted, by field name."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX)
    }


def build_settings(cls: type, values: Mapping[str, Any]) -> Any:
    """A `cls` from the settings among `values` that are its own."""
    own = {item.name: item for item in settings_of(cls)}
    return cls(**{name: own[name].convert(value) for name, value in values.items() if name in own})


def _add_positional(group: argparse._ArgumentGroup, item: Setting, *, required: bool) -> None:
    group.add_argument(
        _PREFIX + item.name,
        metavar=item.name.upper(),
        help=item.doc,
        nargs=None if required else "?",
        default=argparse.SUPPRESS,
    )


def _add_flag(group: argparse._ArgumentGroup, item: Setting) -> None:
    names = [item.flag, *("--" + alias for alias in item.aliases)]
    dest, default = _PREFIX + item.name, argparse.SUPPRESS
    if item.kind is bool:
        state = "on" if item.default else "off"
        group.add_argument(
            *names,
            dest=dest,
            default=default,
            help=f"{item.doc} (default: {state})",
            action=argparse.BooleanOptionalAction,
        )
        return
    group.add_argument(
        *names, dest=dest, default=default, metavar=_metavar(item), help=_help(item), type=str
    )


def _metavar(item: Setting) -> str:
    if item.choices:
        return "{" + ",".join(item.choices) + "}"
    return {str: "TEXT", int: "N", float: "X"}[item.kind]


def _help(item: Setting) -> str:
    text = item.doc.replace("%", "%%")
    if item.default not in (None, "") and "default:" not in text:
        text += f" (default: {item.default})"
    return text
