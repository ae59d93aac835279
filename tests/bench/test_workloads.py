"""Workloads: seeded, of the lengths asked for, and sharing what their name says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from phloem.bench.workloads import WORKLOADS, Session, Shape, make_sessions, total_turns
from phloem.core.errors import ConfigError

SHAPE = Shape(
    requests=21,
    max_tokens=5,
    prefix_tokens=64,
    unique_tokens=16,
    groups=3,
    turns=4,
    seed=1,
)


def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    lines = [
        {"input_length": 40, "output_length": 2, "hash_ids": [0, 1, 2]},
        {"input_length": 37, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"input_length": 48, "output_length": 9, "hash_ids": [0, 3, 4]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def ids(session: Session) -> list[int]:
    return [i for turn in session.turns for piece in turn.pieces for i in piece.ids()]


@pytest.mark.parametrize("name", [n for n in WORKLOADS if n != "trace"])
def test_as_many_turns_as_asked_and_the_same_for_the_same_seed(name: str) -> None:
    sessions = make_sessions(name, SHAPE)
    assert total_turns(sessions) == SHAPE.requests
    assert sessions == make_sessions(name, SHAPE)
    other = make_sessions(name, dataclasses.replace(SHAPE, seed=2))
    assert [ids(s) for s in other] != [ids(s) for s in sessions]


def test_shared_prefixes_are_as_many_as_groups_and_ends_are_unique() -> None:
    prompts = [ids(s) for s in make_sessions("shared-prefix", SHAPE)]
    assert {len(p) for p in prompts} == {80}
    assert len({tuple(p[:64]) for p in prompts}) == SHAPE.groups
    assert len({tuple(p) for p in prompts}) == SHAPE.requests


def test_questions_to_a_document_share_all_of_it() -> None:
    prompts = [ids(s) for s in make_sessions("long-document", SHAPE)]
    assert len({tuple(p[:256]) for p in prompts}) == 6  # 21 questions, 4 a document
    assert {len(p) for p in prompts} == {272}


def test_chats_of_a_group_begin_alike() -> None:
    sessions = make_sessions("multi-turn", SHAPE)
    assert [len(s.turns) for s in sessions] == [4, 4, 4, 4, 4, 1]
    assert ids(sessions[0])[:64] == ids(sessions[3])[:64] != ids(sessions[1])[:64]


def test_a_trace_keeps_lengths_and_shares_by_hash_id(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, trace=trace_file(tmp_path))
    sessions = make_sessions("trace", shape)
    a, b, c = map(ids, sessions)
    assert (len(a), len(b), len(c)) == (40, 37, 48)
    assert a[:37] == b
    assert a[:16] == c[:16]
    assert a[16:32] != c[16:32]
    assert [s.turns[0].max_tokens for s in sessions] == [2, 5, 5]
    assert len(make_sessions("trace", dataclasses.replace(shape, requests=2))) == 2


@pytest.mark.parametrize(
    "text", ["{", '{"input_length": 3}', "[]", '{"input_length": "x", "hash_ids": []}']
)
def test_a_broken_trace_names_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 3, "output_length": 1, "hash_ids": [1]}\n' + text, "utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        make_sessions("trace", dataclasses.replace(SHAPE, trace=path))


def test_text_is_about_as_long_as_asked_and_follows_its_key() -> None:
    (session, *_) = make_sessions("shared-prefix", SHAPE)
    piece = session.turns[0].pieces[0]
    assert piece.text() == piece.text()
    assert len(piece.text().split()) == 38
