"""What every group must do, whatever carries it: threads, shared memory, gloo."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from phloem.core.errors import GroupError
from phloem.core.group import OpKind, Reduce, Tally
from phloem.groups import ShmGroup, TorchGroup, local_groups, shm_seats
from phloem.groups.base import BaseGroup

PATIENT_S = 60.0
CHUNK_BYTES = 1024  # of shared memory: so that small tensors travel in several chunks
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int64]
KINDS = ["local", "shm", "gloo"]


def make(kind: str, size: int, timeout_s: float = PATIENT_S) -> list[BaseGroup]:
    if kind == "local":
        return [*local_groups(size, timeout_s=timeout_s)]
    if kind == "shm":
        seats = shm_seats(size, timeout_s=timeout_s, chunk_bytes=CHUNK_BYTES)
        return [ShmGroup(seat) for seat in seats]
    store = dist.HashStore()
    made: list[BaseGroup | None] = [None] * size

    def meet(rank: int) -> None:
        made[rank] = TorchGroup.gloo(store, rank=rank, size=size, timeout_s=timeout_s)

    in_threads(size, meet)
    return made


def in_threads(size: int, main: Callable[[int], object]) -> list[object]:
    """Run `main(rank)` in a thread per rank; their results. The first error is raised."""
    results: list[object] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = main(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def groups_of(request):
    made: list[BaseGroup] = []

    def build(kind: str, size: int, timeout_s: float = PATIENT_S) -> list[BaseGroup]:
        groups = make(kind, size, timeout_s)
        made.extend(groups)
        return groups

    yield build
    for group in made:
        group.close()


def filled(count: int, dtype: torch.dtype, *seed: int) -> torch.Tensor:
    """Numbers that depend on the seed alone: every rank can say what another one has."""
    generator = torch.Generator().manual_seed(hash(seed) & 0x7FFFFFFF)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


class Script:
    """A seeded list of operations; every rank plays it and checks what it gets."""

    def __init__(self, seed: int, size: int, num_ops: int) -> None:
        self.size = size
        rng = random.Random(seed)
        self.ops = [self._draw(rng, serial) for serial in range(num_ops)]

    def _draw(self, rng: random.Random, serial: int) -> tuple:
        kind = rng.choice(["barrier", "broadcast", "gather", "to_all", "reduce", "verify"])
        dtype = rng.choice(DTYPES)
        counts = [[rng.choice([0, 1, 7, 200, 1500]) for _ in range(self.size)] for _ in range(9)]
        return kind, serial, dtype, counts, rng.randrange(self.size), rng.choice(list(Reduce))

    def play(self, group: BaseGroup, lead: int) -> None:
        """`lead`: how many operations are begun before the oldest is finished."""
        open_ones: list[tuple] = []
        for op in self.ops:
            open_ones.append(self._begin(group, *op))
            if len(open_ones) > lead:
                self._end(open_ones.pop(random.Random(op[1]).randrange(len(open_ones))))
        for one in open_ones:
            self._end(one)

    @staticmethod
    def _end(one: tuple) -> None:
        pending, check = one
        if pending is not None:
            pending.finish()
        check()

    def _begin(self, group, kind, serial, dtype, counts, root, how) -> tuple:
        me, size = group.rank, self.size
        if kind in ("barrier", "verify"):
            getattr(group, kind)()
            return None, lambda: None
        if kind == "broadcast":
            wanted = filled(counts[0][0], dtype, serial, root)
            tensor = wanted.clone() if me == root else torch.empty_like(wanted)
            pending = group.begin_broadcast(tensor, root)
            return pending, lambda: check_all([tensor], [wanted])
        if kind == "reduce":
            rows = [filled(counts[0][0], dtype, serial, r) for r in range(size)]
            tensor = rows[me].clone()
            pending = group.begin_all_reduce(tensor, how)
            return pending, lambda: check_all([tensor], [folded(rows, how)])
        table = counts[1 : 1 + size] if kind == "to_all" else [[c] * size for c in counts[0]]
        wanted = [filled(table[r][me], dtype, serial, r, me) for r in range(size)]
        out = [torch.empty_like(w) for w in wanted]
        if kind == "to_all":
            parts = [filled(table[me][r], dtype, serial, me, r) for r in range(size)]
            pending = group.begin_all_to_all(out, parts)
        else:
            wanted = [filled(table[r][0], dtype, serial, r) for r in range(size)]
            pending = group.begin_all_gather(out, filled(table[me][0], dtype, serial, me))
        return pending, lambda: check_all(out, wanted)


def folded(rows: list[torch.Tensor], how: Reduce) -> torch.Tensor:
    stack = torch.stack(rows)
    if how is Reduce.MIN:
        return stack.amin(0)
    if rows[0].dtype is torch.bfloat16:
        return stack.float().sum(0).bfloat16()
    return stack.sum(0, dtype=rows[0].dtype)


def check_all(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(same(g, w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "seed"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_random_operations_bring_the_right_bytes(groups_of, kind, size, seed) -> None:
    """Uneven and empty sizes, all dtypes, many chunks: red if a byte goes astray or to another."""
    script = Script(seed, size, 60)
    groups = groups_of(kind, size)
    in_threads(size, lambda rank: script.play(groups[rank], lead=0))
    assert len({g.operations.digest for g in groups}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "seed"), [(2, 5), (3, 6), (4, 7)])
def test_operations_in_flight_may_be_finished_in_any_order(groups_of, kind, size, seed) -> None:
    """Three are open at a time: red if one takes another's bytes, or waits for a later one."""
    script = Script(seed, size, 60)
    groups = groups_of(kind, size)
    in_threads(size, lambda rank: script.play(groups[rank], lead=3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_of_many_chunks_goes_on_while_the_caller_does_not_ask(groups_of, kind) -> None:
    """Rank 1 is served in full although rank 0 comes back only when rank 1 has finished."""
    one, other = groups_of(kind, 2)
    served = threading.Event()

    def main(rank: int) -> None:
        group = (one, other)[rank]
        mine = filled(20 * CHUNK_BYTES, torch.int8, rank)
        out = [torch.empty_like(mine) for _ in range(2)]
        pending = group.begin_all_gather(out, mine)
        if rank == 0:
            assert served.wait(PATIENT_S)
        pending.finish()
        served.set()
        check_all(out, [filled(20 * CHUNK_BYTES, torch.int8, r) for r in range(2)])

    in_threads(2, main)


@pytest.mark.parametrize("kind", KINDS)
def test_many_small_operations_go_on_while_the_receiver_does_not_ask(groups_of, kind) -> None:
    """More broadcasts than there are slots: the root is done although nobody has called finish."""
    groups = groups_of(kind, 2)
    done = threading.Event()

    def main(rank: int) -> None:
        tensors = [filled(9, torch.int8, n if rank == 0 else 0) for n in range(8)]
        pending = [groups[rank].begin_broadcast(tensor, 0) for tensor in tensors]
        if rank == 1:
            assert done.wait(PATIENT_S)
        for one in pending:
            one.finish(5.0)
        done.set()
        check_all(tensors, [filled(9, torch.int8, n) for n in range(8)])

    in_threads(2, main)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_for_several_ranks_go_on_while_one_of_them_does_not_ask(groups_of, kind) -> None:
    """A part that fits into a chunk, but not into a rank's share of one."""
    groups = groups_of(kind, 4)
    done = threading.Barrier(3)
    count = CHUNK_BYTES - 24

    def main(rank: int) -> None:
        sizes = [[count if source == 0 else 0] * 4 for source in range(4)]
        parts = [filled(size, torch.int8, rank, r) for r, size in enumerate(sizes[rank])]
        out = [torch.empty(sizes[r][rank], dtype=torch.int8) for r in range(4)]
        pending = groups[rank].begin_all_to_all(out, parts)
        if rank == 3:
            pending_is_free.wait(PATIENT_S)
        pending.finish(5.0)
        if rank != 3 and done.wait(PATIENT_S) == 0:
            pending_is_free.set()
        check_all(out, [filled(sizes[r][rank], torch.int8, r, rank) for r in range(4)])

    pending_is_free = threading.Event()
    in_threads(4, main)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_and_bytes_are_counted_exactly(groups_of, kind) -> None:
    groups = groups_of(kind, 3)

    def main(rank: int) -> None:
        group = groups[rank]
        group.barrier()
        group.broadcast(torch.zeros(10), 0)
        counts = [0, 5, 7]
        group.all_gather([torch.empty(c) for c in counts], torch.zeros(counts[rank]))
        parts = [torch.zeros(rank * 3 + r) for r in range(3)]
        group.all_to_all([torch.empty(r * 3 + rank) for r in range(3)], parts)

    in_threads(3, main)
    for rank, group in enumerate(groups):
        traffic = group.traffic()
        barrier = Tally(calls=1, messages_sent=2, messages_received=2)
        assert traffic[OpKind.BARRIER] == barrier
        root = rank == 0
        assert traffic[OpKind.BROADCAST] == Tally(
            calls=1,
            messages_sent=2 * root,
            bytes_sent=80 * root,
            messages_received=1 - root,
            bytes_received=40 * (1 - root),
        )
        sizes = [0, 20, 28]
        assert traffic[OpKind.ALL_GATHER] == Tally(
            calls=1,
            messages_sent=2 * (sizes[rank] > 0),
            bytes_sent=2 * sizes[rank],
            messages_received=2 - (rank != 0) * 1,
            bytes_received=48 - sizes[rank],
        )
        others = [r for r in range(3) if r != rank]
        to_all = traffic[OpKind.ALL_TO_ALL]
        assert to_all.bytes_sent == sum(4 * (rank * 3 + r) for r in others)
        assert to_all.bytes_received == sum(4 * (r * 3 + rank) for r in others)
    total_sent = sum(sum(t.bytes_sent for t in g.traffic().values()) for g in groups)
    assert total_sent == sum(sum(t.bytes_received for t in g.traffic().values()) for g in groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_has_left_is_named(groups_of, kind) -> None:
    """The rest of them gets an error at once, not at the deadline; and again on the next call."""
    groups = groups_of(kind, 3)
    in_threads(3, lambda rank: groups[rank].barrier())
    groups[2].close()

    def main(rank: int) -> GroupError | None:
        if rank == 2:
            return None
        with pytest.raises(GroupError) as caught:
            groups[rank].all_gather([torch.empty(4) for _ in range(3)], torch.zeros(4))
        with pytest.raises(GroupError):
            groups[rank].barrier()
        return caught.value

    errors = in_threads(3, main)
    assert [errors[r].ranks for r in (0, 1)] == [(2,), (2,)]
    assert "rank 2 of cp is gone: all_gather" in str(errors[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_late_at_the_deadline(groups_of, kind) -> None:
    """Also for a transfer of many chunks, which a thread of the group moves."""
    for count in (4, 20 * CHUNK_BYTES):
        groups = groups_of(kind, 2)
        tensor = torch.zeros(count, dtype=torch.uint8)
        with pytest.raises(GroupError, match="rank 1 of cp is late: all_gather") as caught:
            groups[0].all_gather([tensor, torch.empty_like(tensor)], tensor, timeout_s=0.05)
        assert caught.value.ranks == (1,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stray", [0, 1, 2])
def test_verify_names_the_rank_that_did_something_else(groups_of, kind, stray) -> None:
    """One that slips past: a broadcast of the stray's own, which receives nothing, does not hang.

    Where rank 0 itself strays the others are named: it is the leader.
    """
    groups = groups_of(kind, 3, 5.0)

    def main(rank: int) -> GroupError:
        group = groups[rank]
        group.barrier()
        group.broadcast(torch.zeros(0), rank if rank == stray else (stray + 1) % 3)
        with pytest.raises(GroupError) as caught:
            group.verify()
        return caught.value

    named = [set(error.ranks) for error in in_threads(3, main)]
    wanted = {1, 2} if stray == 0 else {stray}
    assert named[0]
    assert named[0] <= wanted
    # Others may meet before rank 0 has come, and can then only say that the two of them differ.
    assert all(ranks & wanted for ranks in named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_skips_an_operation_is_named(groups_of, kind) -> None:
    """O-27: an early return on one rank. Nobody hangs, and the message is not `late`."""
    groups = groups_of(kind, 2, 2.0)

    def skipping(group: BaseGroup) -> None:
        if group.rank == 0:
            group.all_reduce(torch.zeros(3), Reduce.MIN)
        group.all_gather([torch.empty(5) for _ in range(2)], torch.zeros(5))

    def main(rank: int) -> GroupError:
        group = groups[rank]
        with pytest.raises(GroupError) as caught:
            skipping(group)
        return caught.value

    for error in in_threads(2, main):
        assert error.ranks == (1,)
        assert "does not do the operations of rank 0" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_have_the_same_bits_on_every_rank(groups_of, kind) -> None:
    """In rank order whatever carries it: red if a group folds in its own order."""
    groups = groups_of(kind, 3)
    rows = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def main(rank: int) -> torch.Tensor:
        tensor = rows[rank].clone()
        groups[rank].all_reduce(tensor, Reduce.SUM)
        return tensor

    for tensor in in_threads(3, main):
        assert torch.equal(tensor, (rows[0] + rows[1]) + rows[2])


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls_are_refused_and_leave_the_group_whole(groups_of, kind) -> None:
    groups = groups_of(kind, 2)
    grid = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="2 ranks"):
        groups[0].all_gather([grid], grid)
    with pytest.raises(ValueError, match=r"out\[0\] has 16 bytes for 64"):
        groups[0].all_gather([grid[0], grid], grid)
    with pytest.raises(ValueError, match="contiguous"):
        groups[0].begin_broadcast(grid.T[:2], 0)
    with pytest.raises(ValueError, match="root 2"):
        groups[0].begin_broadcast(grid, 2)
    in_threads(2, lambda rank: groups[rank].verify())
