"""Public faults of other engines, at the level of the cache; invariants after each."""

from __future__ import annotations

import pytest

from phloem.cache import check_invariants
from phloem.cache.chain import default_hasher
from phloem.core.errors import NoRoom
from phloem.core.namespace import make_namespace
from tests.cache.build import NS, cached, make, run_of, serve, start, toks

PAGES = pytest.mark.parametrize("page", [1, 4, 16])


@PAGES
@pytest.mark.parametrize("shape", [(1, -1), (1, 0), (1, 1), (2, -1), (2, 0), (2, 1), (5, 0)])
def test_o01_whole_prompt_cached(page, shape):
    """A repeat has floor_P(n - 1) tokens cached, each time; the next turn finds the answer too."""
    n = max(1, shape[0] * page + shape[1])
    prompt = run_of(100, n)
    cache = make(page)
    expected = (n - 1) // page * page
    assert [serve(cache, prompt) for _ in range(3)] == [0, expected, expected]
    answered = prompt + run_of(5000, 3 * page)
    with start(cache, prompt) as reservation:
        reservation.extend(-(-(n + 3 * page) // page) - reservation.num_pages)
        for length in range(n, n + 3 * page):  # the last sampled token has no KV yet
            reservation.commit(answered[: 4 * length])
            check_invariants(cache)
    follow_up = answered + run_of(9000, page)
    assert serve(cache, follow_up) == (n + 3 * page - 1) // page * page
    check_invariants(cache, idle=True)


@PAGES
def test_o03_the_loser_of_a_race_is_pointed_to_the_winners_pages(page):
    """Two requests compute the same prefix; one copy stays and both tables name it."""
    cache = make(page, 16)
    head = run_of(100, 4 * page)
    first, second = head + run_of(1000, page), head + run_of(2000, page)
    one, two = start(cache, first), start(cache, second)
    assert not set(one.refs.tolist()) & set(two.refs.tolist())
    assert one.commit(first[: 8 * page]) is None  # a chunk of two pages
    changed = two.commit(second[: 8 * page])
    assert changed is not None
    assert (changed.first_page, changed.refs.tolist()) == (0, one.refs[:2].tolist())
    check_invariants(cache)
    assert two.commit(second[: 16 * page]) is None  # now the other one is ahead
    changed = one.commit(first)
    assert changed is not None
    assert (changed.first_page, changed.refs.tolist()) == (2, two.refs[2:4].tolist())
    assert one.refs[:4].tolist() == two.refs[:4].tolist()
    check_invariants(cache)
    others = [start(cache, run_of(7000 + 100 * i, page)) for i in range(8)]  # use freed pages
    used = {ref for other in others for ref in other.refs.tolist()}
    assert not used & set(one.refs.tolist() + two.refs.tolist())
    two.commit(second)
    for reservation in (one, two, *others):
        reservation.close()
    check_invariants(cache, idle=True)
    assert cache.evictable_pages == 6
    assert cache.stats().nodes == 3


@PAGES
def test_o03_arrays_already_handed_out_do_not_change(page):
    """A plan in flight keeps the table it was made with."""
    cache = make(page)
    tokens = run_of(100, 3 * page)
    one, two = start(cache, tokens), start(cache, tokens)
    before = two.refs
    copy = before.tolist()
    one.commit(tokens)
    assert two.commit(tokens) is not None
    two.extend(2)
    assert before.tolist() == copy
    one.close()
    two.close()
    check_invariants(cache, idle=True)


@PAGES
def test_o04_the_matched_node_itself_is_locked(page):
    """Evict everything while a request rests on A -> B: only the sibling goes."""
    cache = make(page)
    a, b, x = run_of(100, 2 * page), run_of(1000, 2 * page), run_of(2000, 3 * page)
    serve(cache, a + b)
    serve(cache, a + x)
    match = cache.match(NS, a + b)
    assert match.num_pages == 4
    with cache.reserve(match, 1):
        assert cache.evict(1000) == 3
        check_invariants(cache)
        assert cached(cache, a + b) == 4 * page
        assert cached(cache, a + x) == 2 * page
    check_invariants(cache, idle=True)
    assert cache.evict(1000) == 4
    assert cache.free_pages == cache.total_pages


@PAGES
def test_o04_a_split_leaves_both_parts_their_locks(page):
    """A match ends inside an edge whose end another request holds."""
    cache = make(page)
    tokens = run_of(100, 6 * page)
    serve(cache, tokens)
    deep = cache.reserve(cache.match(NS, tokens), 0)
    shallow = cache.reserve(cache.match(NS, tokens[: 8 * page]), 1)
    check_invariants(cache)
    assert cache.stats().nodes == 2
    assert cache.evict(1000) == 0
    deep.close()
    check_invariants(cache)
    assert cache.evictable_pages == 4
    assert cache.evict(1000) == 4
    assert cached(cache, tokens) == 2 * page
    shallow.close()
    check_invariants(cache, idle=True)
    assert cache.evictable_pages == 2


@PAGES
def test_o05_pages_are_freed_once_however_a_request_ends(page):
    cache = make(page, 16)
    reservation = start(cache, run_of(100, 3))
    reservation.extend(2)  # a step in flight has one more page than is committed
    reservation.commit(run_of(100, 3))
    reservation.close()
    reservation.close()
    check_invariants(cache, idle=True)
    assert cache.free_pages + cache.evictable_pages == 16
    freed = cache.take_freed().tolist()
    assert len(freed) == len(set(freed))


@PAGES
@pytest.mark.parametrize("how", ["disabled", "not shared"])
def test_o06_chunks_go_on_without_the_cache(page, how):
    """Each page is allocated once, nothing is inserted, and all come back."""
    cache = make(page, 32, enabled=how != "disabled")
    prompt = run_of(100, 10 * page + 1)
    running = [start(cache, prompt, share=how == "disabled") for _ in range(2)]
    tables = [reservation.refs.tolist() for reservation in running]
    assert len(set(tables[0] + tables[1])) == 22
    for end in range(3, 10, 3):
        for reservation in running:
            assert reservation.commit(prompt[: 4 * page * end]) is None
            assert reservation.num_committed_pages == end
            check_invariants(cache)
    assert [reservation.refs.tolist() for reservation in running] == tables
    assert cached(cache, prompt) == 0
    for reservation in running:
        reservation.close()
    check_invariants(cache, idle=True)
    assert cache.free_pages == 32


@PAGES
def test_o12_what_is_not_committed_is_never_served(page):
    """Neither to requests of the same batch, nor after the one that should compute it aborts."""
    cache = make(page)
    prompt = run_of(100, 6 * page)
    first = start(cache, prompt)
    assert cached(cache, prompt) == 0
    first.commit(prompt[: 16 * page])
    assert cached(cache, prompt) == 4 * page
    second = start(cache, prompt + toks(1))
    assert second.num_cached_pages == 4
    first.close()  # aborted before it computed the rest
    assert cached(cache, prompt) == 4 * page
    second.close()
    check_invariants(cache, idle=True)


@PAGES
def test_o13_namespaces_never_share(page):
    """Adapter and salt, concatenations, empty and absent: all differ, at every length."""
    spaces = [
        make_namespace(model="m"),
        make_namespace(model="m", adapter="abc"),
        make_namespace(model="m", salt="abc"),
        make_namespace(model="m", adapter="a", salt="bc"),
        make_namespace(model="m", adapter="ab", salt="c"),
        make_namespace(model="m", salt=""),
        make_namespace(model="m", generation=1),
        make_namespace(model="mabc"),
        b"",
        b"\0\0\0\0",
    ]
    cache = make(page, 64)
    prompt = bytes(4 * 4 * page)  # zeros: a namespace could pass for a first token
    for space in spaces:
        assert serve(cache, prompt + toks(1), namespace=space) == 0
    for space in spaces:
        assert serve(cache, prompt + toks(1), namespace=space) == 4 * page
    assert cache.stats().nodes >= len(spaces)
    check_invariants(cache, idle=True)


@PAGES
def test_o16_equal_hashes_serve_nothing_wrong(page):
    """With a hash that is constant the tree still tells all prompts apart."""
    cache = make(page, 32)
    cache.state.tree.hasher = lambda data, seed: 0
    prompts = [run_of(1000 * i, 4 * page + 1) for i in range(12)]
    for _ in range(2):
        for prompt in prompts:
            serve(cache, prompt)
    refs = [tuple(cache.match(NS, prompt).refs().tolist()) for prompt in prompts]
    flat = [ref for table in refs for ref in table]
    assert len(flat) == len(set(flat))
    check_invariants(cache, idle=True)
    assert default_hasher(b"", 1) != default_hasher(b"", 2)


@PAGES
def test_o16_an_edge_is_compared_to_its_last_token(page):
    """Prompts that differ in one token of a long edge share exactly the pages before it."""
    tokens = run_of(100, 12 * page)
    for index in range(12 * page):
        cache = make(page)
        serve(cache, tokens)
        other = tokens[: 4 * index] + toks(999_999) + tokens[4 * index + 4 :]
        assert cached(cache, other) == index // page * page
    assert cached(cache, tokens) == 12 * page


@PAGES
def test_o22_eviction_between_match_and_reserve(page):
    """A match holds nothing: what went is recomputed, and the table is as long as was asked."""
    cache = make(page, 16)
    prompt = run_of(100, 6 * page)
    serve(cache, prompt)
    match = cache.match(NS, prompt)
    cache.evict(4)
    with cache.reserve(match, 2) as reservation:
        assert reservation.num_cached_pages == 2
        assert reservation.num_pages == 8
        check_invariants(cache)
        reservation.commit(prompt)
    assert cached(cache, prompt) == 6 * page
    stale = cache.match(NS, prompt[: 8 * page])
    cache.flush()
    with cache.reserve(stale, 1) as reservation:
        assert (reservation.num_cached_pages, reservation.num_pages) == (0, 3)
    check_invariants(cache, idle=True)


def test_o22_a_stale_match_that_no_longer_fits_is_refused():
    cache = make(1, 4)
    serve(cache, run_of(100, 4))
    match = cache.match(NS, run_of(100, 4))
    cache.evict(4)
    blocker = start(cache, run_of(500, 1))
    before = cache.state.digest()
    assert not cache.can_reserve(match, 0)
    with pytest.raises(NoRoom):
        cache.reserve(match, 0)
    assert cache.state.digest() == before
    blocker.close()
    check_invariants(cache, idle=True)
