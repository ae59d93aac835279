"""What every store must do, whatever is below. A backend's test class inherits StoreContract."""

from __future__ import annotations

import random

import pytest

from phloem.core.store import KEY_BYTES, Op, Span, Status, Verb
from phloem.stores import Backend
from tests.stores.rig import ARENA_BYTES, MISS, OK, Rig, bytes_of, key_of, make_rig

SIZE_BYTES = 8 << 20
LENGTHS = [1, 100, 4095, 4096, 4097, 24_576, 245_760]


class StoreContract:
    """Subclasses say how a backend of `SIZE_BYTES` is made."""

    def backend(self) -> Backend:
        raise NotImplementedError

    @pytest.fixture
    def rig(self) -> Rig:
        with make_rig(self.backend()) as rig:
            yield rig

    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("base", [0, 64, 1])
    def test_what_was_put_is_got_byte_for_byte(self, rig: Rig, length: int, base: int) -> None:
        """Aligned, cache-line aligned and odd buffers, of whole blocks or not."""
        names = [f"{length}-{i}" for i in range(5)]
        assert rig.put(names, length, base) == (OK,) * 5
        assert rig.get(names, length, base) == (OK,) * 5
        assert rig.get(names[::-1], length, base) == (OK,) * 5

    def test_a_buffer_may_be_read_elsewhere_than_it_was_written(self, rig: Rig) -> None:
        rig.put(["a", "b"], 5000, base=0)
        assert rig.get(["b", "a"], 5000, base=12_345) == (OK, OK)

    def test_neighbours_of_a_read_buffer_are_not_touched(self, rig: Rig) -> None:
        rig.put(["a"], 4100)
        rig.view[:] = b"\xee" * ARENA_BYTES
        spans = (Span(0, 8192, 4100),)
        assert rig.run(Op(verb=Verb.GET, keys=(key_of("a"),), spans=spans)) == (OK,)
        assert bytes(rig.view[:8192]) == b"\xee" * 8192
        assert bytes(rig.view[8192 + 4100 :]) == b"\xee" * (ARENA_BYTES - 8192 - 4100)

    def test_statuses_stand_in_the_order_of_the_keys(self, rig: Rig) -> None:
        rig.put(["a", "b", "c"], 4096)
        assert rig.get(["x", "c", "y", "a", "z", "b"], 4096) == (MISS, OK, MISS, OK, MISS, OK)
        assert rig.probe(["b", "x", "a"]) == (OK, MISS, OK)

    def test_a_key_keeps_its_first_object(self, rig: Rig) -> None:
        """Same key, same bytes is the caller's promise; a store never half-replaces."""
        rig.put(["a"], 4096)
        rig.view[:4096] = b"\xff" * 4096
        op = Op(verb=Verb.PUT, keys=(key_of("a"),), spans=(Span(0, 0, 4096),))
        assert rig.run(op) == (OK,)
        assert rig.get(["a"], 4096) == (OK,)

    def test_an_object_of_another_length_is_a_miss(self, rig: Rig) -> None:
        rig.put(["a"], 4096)
        assert rig.get(["a"], 4095) == (MISS,)
        assert rig.get(["a"], 4097) == (MISS,)
        assert rig.get(["a"], 4096) == (OK,)

    def test_keys_that_differ_in_one_bit_are_different(self, rig: Rig) -> None:
        rig.put(["a"], 100)
        for position in range(KEY_BYTES):
            near = bytearray(key_of("a"))
            near[position] ^= 1 << (position % 8)
            op = Op(verb=Verb.GET, keys=(bytes(near),), spans=(Span(0, 0, 100),))
            assert rig.run(op) == (MISS,)

    def test_one_key_twice_in_a_batch(self, rig: Rig) -> None:
        assert rig.put(["a", "b", "a"], 4096) == (OK, OK, OK)
        assert rig.get(["a", "a", "b"], 4096) == (OK, OK, OK)

    def test_what_was_dropped_is_gone_and_can_be_put_again(self, rig: Rig) -> None:
        rig.put(["a", "b"], 4096)
        assert rig.drop(["a", "never there"]) == (OK, OK)
        assert rig.probe(["a", "b"]) == (MISS, OK)
        assert rig.get(["a", "b"], 4096) == (MISS, OK)
        assert rig.put(["a"], 4096) == (OK,)
        assert rig.get(["a"], 4096) == (OK,)

    def test_an_object_too_large_is_refused_alone(self, rig: Rig) -> None:
        largest = rig.store.caps.max_object_bytes
        if largest >= ARENA_BYTES:
            pytest.skip("the arena is smaller than the largest object")
        rig.view[:4096] = bytes_of("small", 4096)
        spans = (Span(0, 0, largest + 1), Span(0, 0, 4096))
        op = Op(verb=Verb.PUT, keys=(key_of("large"), key_of("small")), spans=spans)
        assert rig.run(op) == (Status.FULL, OK)
        assert rig.probe(["large"]) == (MISS,)
        assert rig.get(["small"], 4096) == (OK,)

    def test_the_largest_object_fits(self, rig: Rig) -> None:
        length = min(rig.store.caps.max_object_bytes, ARENA_BYTES)
        assert rig.put(["a"], length) == (OK,)
        assert rig.get(["a"], length) == (OK,)

    def test_the_bound_holds_at_every_moment_and_young_objects_survive(self, rig: Rig) -> None:
        """Five times the capacity goes through; every answer is right or a miss."""
        length = 65_536
        written = 0
        while written < 5 * SIZE_BYTES:
            names = [f"n{written + i}" for i in range(8)]
            assert rig.put(names, length) == (OK,) * 8
            written += 8 * length
            stats = rig.store.stats()
            assert stats.used_bytes <= stats.capacity_bytes <= SIZE_BYTES
            assert rig.get(names, length) == (OK,) * 8
        assert stats.evicted_objects_total > 0
        assert rig.get(["n0"], length) == (MISS,)

    def test_what_was_evicted_is_told_and_nothing_else(self, rig: Rig) -> None:
        """Three times the capacity, some of it read again: memory of what is stored stays true."""
        if not rig.store.caps.tells_gone:
            pytest.skip("this store never says")
        draw = random.Random(11)
        length = 65_536
        names: list[str] = []
        count = 0
        while count * length < 3 * SIZE_BYTES:
            batch = [f"n{count + i}" for i in range(draw.randrange(1, 12))]
            count += len(batch)
            assert set(rig.put(batch, length)) == {OK}
            names += batch
            rig.get(draw.sample(names, min(4, len(names))), length)
            rig.drop([names.pop(draw.randrange(len(names)))])
        rig.pump()
        there = rig.probe(names)
        assert [key_of(n) in rig.gone for n in names] == [status is MISS for status in there]
        assert OK in there

    def test_what_was_dropped_on_request_is_not_told(self, rig: Rig) -> None:
        rig.put(["a", "b"], 4096)
        rig.drop(["a"])
        rig.pump()
        assert not rig.gone

    def test_any_mix_of_operations_serves_right_pages_only(self, rig: Rig) -> None:
        """Random batches, several in flight; each ticket is answered once, and nothing leaks."""
        draw = random.Random(7)
        known: set[int] = set()
        for _ in range(150):
            names = [draw.randrange(60) for _ in range(draw.randrange(1, 12))]
            length = 8192
            roll = draw.random()
            if roll < 0.5:
                tickets = [rig.submit(rig.put_op(names, length))]
                known.update(names)
            elif roll < 0.9:
                op = rig.get_op(names, length)
                twin = Op(verb=Verb.PROBE, keys=op.keys)
                tickets = [rig.submit(op), rig.submit(twin)]
                statuses = rig.answer(tickets[0]).statuses
                rig.check_content(names, op, statuses)
                want = tuple(OK if name in known else MISS for name in names)
                assert statuses == want
                assert rig.answer(tickets[1]).statuses == want
            else:
                tickets = [rig.submit(Op(verb=Verb.DROP, keys=tuple(map(key_of, names))))]
                known.difference_update(names)
            for ticket in tickets:
                rig.answer(ticket)
        stats = rig.store.stats()
        assert (stats.in_flight, stats.held_spans, stats.objects) == (0, 0, len(known))

    def test_an_empty_batch_is_answered(self, rig: Rig) -> None:
        for verb in Verb:
            assert rig.run(Op(verb=verb, keys=())) == ()

    def test_a_span_outside_its_arena_is_an_error_of_the_caller(self, rig: Rig) -> None:
        for span in [Span(0, ARENA_BYTES - 10, 11), Span(0, -1, 5), Span(9, 0, 5)]:
            with pytest.raises(ValueError, match="arena"):
                rig.submit(Op(verb=Verb.GET, keys=(key_of("a"),), spans=(span,)))

    def test_a_closed_store_answers_down_at_once(self, rig: Rig) -> None:
        rig.put(["a"], 4096)
        rig.close()
        ticket = rig.submit(rig.get_op(["a"], 4096))
        rig.pump()
        assert rig.answers[ticket].statuses == (Status.DOWN,)
        rig.close()

    def test_counters_tell_what_happened(self, rig: Rig) -> None:
        rig.put(["a", "b"], 4096)
        rig.get(["a", "x"], 4096)
        stats = rig.store.stats()
        assert stats.count(Verb.PUT, OK) == 2
        assert stats.count(Verb.GET, OK) == 1
        assert stats.count(Verb.GET, MISS) == 1
        assert (stats.written_bytes_total, stats.read_bytes_total) == (8192, 4096)
        assert stats.objects == 2


class PersistentContract:
    """For backends whose objects survive the process. `backend()` opens the same place again."""

    def backend(self) -> Backend:
        raise NotImplementedError

    def test_everything_is_there_after_an_orderly_restart(self) -> None:
        for turn in range(3):
            with make_rig(self.backend()) as rig:
                for old in range(turn):
                    assert rig.get([f"{old}-{i}" for i in range(20)], 30_000) == (OK,) * 20
                assert rig.put([f"{turn}-{i}" for i in range(20)], 30_000) == (OK,) * 20
