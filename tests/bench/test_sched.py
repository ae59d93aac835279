"""The scheduler bench: stable names, and no cliff with the length of the queue."""

from __future__ import annotations

import pytest

from phloem.bench.sched import run


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    document = run(quick=True)
    assert document["bench"] == "sched"
    return {result["name"]: result for result in document["results"]}


def test_names_and_units_are_stable(results: dict[str, dict]):
    assert list(results) == [
        "step_1000_queued_us",
        "step_1000_queued_no_room_us",
        "step_10_queued_us",
    ]
    assert {result["unit"] for result in results.values()} == {"us"}


def test_a_step_with_a_thousand_queued_is_quick(results: dict[str, dict]):
    """The quickest tenth, since other processes of a shared machine interrupt the rest."""
    quick = {name: sorted(r["samples"])[len(r["samples"]) // 10] for name, r in results.items()}
    assert quick["step_1000_queued_us"] <= 2000
    assert quick["step_1000_queued_no_room_us"] <= 2000
    assert quick["step_1000_queued_us"] < 3 * quick["step_10_queued_us"]
