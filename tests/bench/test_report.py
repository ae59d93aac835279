"""The one form of every bench's report."""

from __future__ import annotations

import io
import json
import math

import pytest

from phloem.bench.report import (
    Result,
    format_value,
    paired_ratio,
    percentile,
    print_report,
    results_from,
    summary,
)


def test_the_last_line_is_one_json_document() -> None:
    out, err = io.StringIO(), io.StringIO()
    results = [Result(name="a_s", value=0.5, unit="s"), summary("b", [3.0, 1.0, 2.0], "s")]
    print_report("demo", results, facts={"x": 1}, stdout=out, stderr=err)
    document = json.loads(out.getvalue().splitlines()[-1])
    assert out.getvalue().count("\n") == 1
    assert document["bench"] == "demo"
    assert document["x"] == 1
    assert document["results"][0] == {"name": "a_s", "value": 0.5, "unit": "s"}
    assert document["results"][1]["value"] == 2.0
    assert document["results"][1]["samples"] == [3.0, 1.0, 2.0]
    assert {"cpu", "cores", "memory_bytes", "load_average", "versions"} <= set(document["machine"])
    assert "a_s" in err.getvalue()


def test_what_could_not_be_measured_is_null_not_nan() -> None:
    out = io.StringIO()
    results = [Result(name="a", value=None, unit="s"), Result(name="b", value=math.nan, unit="s")]
    print_report("demo", results, stdout=out, stderr=io.StringIO())
    assert [r["value"] for r in json.loads(out.getvalue())["results"]] == [None, None]


def test_a_ratio_carries_both_sides_samples_and_its_spread() -> None:
    result = paired_ratio("r", [(1.0, 2.0), (1.0, 4.0), (3.0, 4.0)], sides=("new", "old"))
    assert result.value == 0.5
    assert result.samples == {"new": [1.0, 1.0, 3.0], "old": [2.0, 4.0, 4.0]}
    assert result.spread == (0.25, 0.75)


def test_percentiles_are_nearest_rank() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2
    assert percentile([4, 1, 3, 2], 99) == 4
    assert percentile([7], 1) == 7
    assert math.isnan(percentile([], 50))


def test_results_of_a_plain_dictionary() -> None:
    document = {"results": [{"name": "x_us", "value": 2, "unit": "us", "samples": [1, 2, 3]}]}
    (result,) = results_from(document)
    assert (result.name, result.value, result.spread) == ("x_us", 2, (1, 3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0.0, "0"),
        (12345.0, "12,345"),
        (0.0123, "0.01230"),
        (3.14159, "3.142"),
        (1234.5678, "1,235"),
        (1.5e-9, "1.5e-09"),
    ],
)
def test_figures_are_readable(value: float | None, text: str) -> None:
    assert format_value(value) == text
