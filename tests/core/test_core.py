"""The shared nouns: packing, validation, isolation of namespaces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from phloem.core.clock import VirtualClock
from phloem.core.errors import BadRequest, PhloemError, UserError
from phloem.core.namespace import make_namespace, portable_part
from phloem.core.refs import make_ref, owner_of, slot_of, slots_of
from phloem.core.request import CachedTokens, SamplingParams
from phloem.core.tokens import num_tokens, tokens_from_bytes, tokens_to_bytes


@pytest.mark.parametrize("owner", [0, 1, 7, 2**23 - 1])
@pytest.mark.parametrize("slot", [0, 1, 12345, 2**40 - 1])
def test_a_page_ref_keeps_owner_and_slot(owner: int, slot: int) -> None:
    ref = make_ref(owner, slot)
    assert 0 <= ref < 2**63
    assert (owner_of(ref), slot_of(ref)) == (owner, slot)
    assert slots_of(np.array([ref], dtype=np.int64)).tolist() == [slot]


def test_refs_of_different_pages_differ() -> None:
    pairs = list(itertools.product([0, 1, 2], [0, 1, 2**40 - 1]))
    assert len({make_ref(owner, slot) for owner, slot in pairs}) == len(pairs)


def test_tokens_survive_packing() -> None:
    ids = [0, 1, 49151, 2**31 - 1]
    data = tokens_to_bytes(ids)
    assert num_tokens(data) == len(ids)
    assert tokens_from_bytes(data).tolist() == ids


def test_an_id_outside_int32_is_refused_not_wrapped() -> None:
    with pytest.raises(OverflowError):
        tokens_to_bytes([2**31])


def test_o13_namespaces_of_different_origin_never_collide() -> None:
    """Adapter and salt of the same text, shifted borders, empty and absent: all different."""
    variants = [
        {"model": "m"},
        {"model": "m", "adapter": "abc"},
        {"model": "m", "salt": "abc"},
        {"model": "m", "salt": ""},
        {"model": "m", "adapter": ""},
        {"model": "m", "adapter": "a", "salt": "bc"},
        {"model": "m", "adapter": "ab", "salt": "c"},
        {"model": "m", "generation": 1},
        {"model": "m0"},
        {"model": "m\x01"},
    ]
    spaces = [make_namespace(**v) for v in variants]  # type: ignore[arg-type]
    assert len(set(spaces)) == len(spaces)
    assert make_namespace(model="m", salt="abc") == make_namespace(model="m", salt="abc")


BAD_SAMPLING = [
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_k", -1),
    ("min_p", 1.5),
    ("presence_penalty", 3.0),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("nan")),
    ("logprobs", 21),
    ("logprobs", -1),
    ("seed", 2**64),
    ("stop", ("",)),
    ("stop", ("x",) * 65),
    ("stop", ("x" * 5000,)),
    ("stop_token_ids", tuple(range(2000))),
    ("logit_bias", ((1, 101.0),)),
    ("logit_bias", ((1, float("nan")),)),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_a_sampling_value_out_of_range_is_a_bad_request_that_names_it(
    name: str, value: object
) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert name in caught.value.message


def test_every_user_error_has_a_client_status() -> None:
    def leaves(cls: type[UserError]) -> list[type[UserError]]:
        return [cls, *(x for sub in cls.__subclasses__() for x in leaves(sub))]

    assert issubclass(UserError, PhloemError)
    # Other rooms may add their own (413 of the server): all must be ones that clients know.
    assert {cls.status for cls in leaves(UserError)} <= {400, 401, 404, 413, 422, 503}


def test_cached_tokens_sum_over_their_sources() -> None:
    assert CachedTokens(device=16, remote=4, host=2, storage=1).total == 23


def test_a_clock_does_not_run_backwards() -> None:
    clock = VirtualClock(5.0)
    clock.advance(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(AssertionError):
        clock.advance(-1.0)


def test_the_portable_part_of_a_namespace_names_no_place_and_no_process() -> None:
    here = make_namespace(model="/a", generation=3, adapter="x", salt="s")
    there = make_namespace(model="/b", adapter="x", salt="s")
    assert portable_part(here) == portable_part(there) != b""
    assert portable_part(here) != portable_part(make_namespace(model="/a", salt="s"))
    with pytest.raises(ValueError, match="not a namespace"):
        portable_part(b"\x07junk")
