"""RoPE parameters of a Hugging Face `config.json`, in its older and newer spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phloem.config.hf_values import Json, need_float, need_int, positive
from phloem.config.model import RopeConfig, RopeKind
from phloem.core.errors import ConfigError

__all__ = ["rope_config", "rope_of_kind", "yarn_growth"]

_KINDS = "default, linear, llama3, yarn"


def rope_config(raw: Json, *, theta: float = 10000.0) -> RopeConfig:
    """`rope_theta` + `rope_scaling`, or the newer `rope_parameters`; `theta` if none is given."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope_of_kind(scaling, raw, theta=need_float(raw, "rope_theta", theta))


def rope_of_kind(scaling: object, raw: Json, *, theta: float) -> RopeConfig:
    """RoPE of one object of parameters; its own `rope_theta` goes before `theta`."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"RoPE parameters must be a JSON object, got {scaling!r}")
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    theta = need_float(scaling, "rope_theta", theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in (None, "default"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = need_float(scaling, "factor", None)
        return RopeConfig(theta=theta, kind=RopeKind.LINEAR, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=RopeKind.LLAMA3,
            factor=need_float(scaling, "factor", None),
            low_freq_factor=need_float(scaling, "low_freq_factor", None),
            high_freq_factor=need_float(scaling, "high_freq_factor", None),
            original_max_position=need_int(scaling, "original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(scaling, raw, theta)
    raise ConfigError(f"RoPE type {kind!r} is not supported; supported: {_KINDS}")


def _yarn(scaling: Json, raw: Json, theta: float) -> RopeConfig:
    length = need_int(raw, "max_position_embeddings")
    original = need_int(scaling, "original_max_position_embeddings", length)
    factor = positive(scaling, "factor") or length / original
    return RopeConfig(
        theta=theta,
        kind=RopeKind.YARN,
        factor=factor,
        original_max_position=original,
        beta_fast=positive(scaling, "beta_fast") or 32.0,
        beta_slow=positive(scaling, "beta_slow") or 1.0,
        truncate=bool(scaling.get("truncate", True)),
        scale=_yarn_scale(scaling, factor),
    )


def _yarn_scale(scaling: Json, factor: float) -> float:
    """By how much cos and sin grow: `attention_factor`, or what follows from the stretching."""
    given = positive(scaling, "attention_factor")
    if given is not None:
        return given
    over, under = positive(scaling, "mscale"), positive(scaling, "mscale_all_dim")
    if over is not None and under is not None:
        return yarn_growth(factor, over) / yarn_growth(factor, under)
    return yarn_growth(factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """By how much scores of a context `factor` times as long are to grow, before it is squared."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
