"""Records: a follower that gets them in any pieces ends with the leader's state."""

from __future__ import annotations

import random

from phloem.cache import PrefixCache
from phloem.cache.state import CacheState
from phloem.core.errors import NoRoom
from phloem.core.tokens import tokens_to_bytes
from phloem.replica import RecordReader, RecordWriter

PAGES = 24


def test_a_follower_of_records_equals_the_leader_at_every_digest() -> None:
    """Seeded requests over a small pool; a record after any number of commands, none included."""
    rng = random.Random(3)
    cache = PrefixCache(page_size=2, num_pages=(PAGES,))
    writer = RecordWriter(cache.leader.log, cache.state, digest_every=3)
    reader = RecordReader(CacheState(2, (PAGES,)))
    open_ones = []
    digests = 0
    for _ in range(600):
        tokens = tokens_to_bytes([rng.randrange(3) for _ in range(2 * rng.randrange(1, 8))])
        if rng.random() < 0.5 and open_ones:
            open_ones.pop(rng.randrange(len(open_ones))).close()
        else:
            try:
                match = cache.match(b"ns", tokens)
                reservation = cache.reserve(match, len(tokens) // 8 - match.num_pages)
            except NoRoom:
                continue
            reservation.commit(tokens)
            open_ones.append(reservation)
        if rng.random() < 0.4:
            continue
        for _ in range(rng.randrange(1, 3)):
            log, digest = writer.take()
            reader.apply(log)
            if digest is not None:
                digests += 1
                assert reader.digest() == digest == cache.state.digest()
    assert digests > 50
    assert cache.leader.evicted_pages > 50


def test_a_state_that_missed_a_command_has_another_digest() -> None:
    cache = PrefixCache(page_size=2, num_pages=(PAGES,))
    writer = RecordWriter(cache.leader.log, cache.state, digest_every=1)
    reader = RecordReader(CacheState(2, (PAGES,)))
    tokens = tokens_to_bytes([1, 2, 3, 4])
    cache.reserve(cache.match(b"ns", tokens), 2).close()
    writer.take()  # lost
    log, digest = writer.take()
    reader.apply(log)
    assert reader.digest() != digest
