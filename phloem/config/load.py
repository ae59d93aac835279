"""Where settings come from: the command line, a YAML file, the environment, the defaults.

Whoever stands first in that list wins. The result is one frozen `Config`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from phloem.config.options import Config
from phloem.config.setting import Setting, did_you_mean, settings_of
from phloem.core.errors import ConfigError

__all__ = ["ENV_API_KEY", "config_from", "config_groups", "read_config_file"]

# The only environment variable that sets anything; a key should not stand in a process list.
ENV_API_KEY = "PHLOEM_API_KEY"


def config_groups() -> dict[str, type]:
    """The dataclass of each concern, by the name of its field in `Config`."""
    out: dict[str, type] = {}
    for item in dataclasses.fields(Config):
        factory = item.default_factory
        assert isinstance(factory, type), f"{item.name} must be made by its own class"
        out[item.name] = factory
    return out


def config_from(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The settings of a server. `flags`: those of the command line, by field name.

    Raises ConfigError, one line, for an unknown key, a wrong type, a value out of range or two
    settings that contradict each other.
    """
    values: dict[str, Any] = {}
    if environ.get(ENV_API_KEY):
        values["api_key"] = environ[ENV_API_KEY]
    if file is not None:
        values.update(read_config_file(file))
    values.update(flags)
    groups = {}
    for name, cls in config_groups().items():
        own = settings_of(cls)
        groups[name] = cls(**{s.name: s.convert(values[s.name]) for s in own if s.name in values})
    return Config(**groups)


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML file: one mapping of flag names, dashes or underscores."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: must be a mapping of flag names to values")
    known = _known_keys()
    out: dict[str, Any] = {}
    for key, value in data.items():
        item = known.get(str(key).replace("-", "_"))
        if item is None:
            near = did_you_mean(str(key).replace("_", "-"), _printed(known))
            raise ConfigError(f"--config {path}: unknown key {key!r}{near}")
        if item.name in out:
            raise ConfigError(f"--config {path}: {item.name} is given twice")
        try:
            out[item.name] = item.convert(value)
            item.check(out[item.name])
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from None
    return out


def _known_keys() -> dict[str, Setting]:
    return {
        key: item
        for cls in config_groups().values()
        for item in settings_of(cls)
        for key in item.keys
    }


def _printed(known: Mapping[str, Setting]) -> list[str]:
    return [key.replace("_", "-") for key in known]


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error instead of a silent last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
