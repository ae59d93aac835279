"""Which cases of a test run by default, and which with `make test-all` only (marked `long`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["checkered", "few"]


def few(cases: Iterable[Any], count: int) -> list[Any]:
    """The first `count` by default: of seeds, or of numbers of steps, which only add up."""
    return [
        case if number < count else pytest.param(case, marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]


def checkered(*axes: Sequence[Any]) -> list[Any]:
    """The product of axes, every second one by default, as the fields of a board have two colours:
    with three axes or more every two values of different ones still meet. A tuple among an axis's
    values stands for several arguments."""
    assert sum(len(axis) > 1 for axis in axes) > 2, "with two axes half of the pairs would be lost"
    out = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        case: list[Any] = []
        for axis, place in zip(axes, places, strict=True):
            value = axis[place]
            case += value if isinstance(value, tuple) else [value]
        out.append(pytest.param(*case, marks=() if sum(places) % 2 == 0 else pytest.mark.long))
    return out
