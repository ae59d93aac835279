"""The real worker under the real scheduler and cache, and `cold`: the oracle of every journey.

cold(x) is the same engine with every cache off, one request, one chunk. Logits are compared at
every position that was computed, teacher-forced on cold's tokens: the cold pass gets the finished
sequence as its prompt. Freed pages are filled with NaN, so a read of one cannot pass.

A restart lower down computes tokens again whose full state is kept, from window state that is not
there yet: logits before `write_from` are not meant to be right, and nobody samples from them.

Page bytes are compared twice. With cold's: equal but for the rounding of differently shaped matrix
products. With what was computed: every copy of a page, wherever it is, is bit for bit what one step
wrote for these tokens (`Versions`). A page that is computed again while the host has it may differ
from that copy in its last bits; no journey may make bytes that no step has made.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from phloem.cache import HostTier, PrefixCache, ReplicaConfig, WindowConfig, check_invariants
from phloem.cache.components import ABSENT
from phloem.cache.remote_choice import RemoteChooser
from phloem.cache.state import CacheState
from phloem.config.checkpoint import read_model_config
from phloem.core.clock import MonotonicClock
from phloem.core.mesh import Mesh
from phloem.core.namespace import make_namespace
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan, StepResult
from phloem.core.refs import slot_of
from phloem.core.remote import IN_PLACE, RemoteWays
from phloem.core.request import (
    CachedTokens,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    SamplingParams,
)
from phloem.core.store import PageStore
from phloem.core.tokens import TOKEN_BYTES, tokens_to_bytes
from phloem.engine.build_tiers import open_storage
from phloem.engine.identity import key_facts
from phloem.loop import EngineLoop
from phloem.replica import RecordReader, RecordWriter
from phloem.sched import Scheduler, SchedulerConfig
from phloem.tiers import StorageKeys, TierConfig, TierController
from phloem.tiers.config import is_exclusive
from phloem.transfer import TransferHooks
from phloem.worker import (
    Hooks,
    LoadedWorker,
    RankedWorker,
    RankHooks,
    Replica,
    WorkerOptions,
    load_local_ranks,
    load_worker,
)
from tests.parity.apart import RanksApart
from tests.parity.processes import load_process_ranks

__all__ = ["Answer", "Cold", "Rig"]

SETTLE_S = 30.0
RELATIVE = 1e-4  # of the largest logit at the position, or of the largest element of the page
MAX_LEN = 512
STORE_BYTES = 32 << 20
NAMESPACE = make_namespace(model="tiny")
ONE_RANK = Mesh()
Pages = list[list[bytes]]  # of a sequence, by component


@functools.cache
def versions_of(path: Path, page_size: int, kv_dtype: str = "auto") -> Versions:
    """Of one model, over all engines of a test (`conftest` forgets them): storage outlives them."""
    return Versions()


def _load(
    path: Path,
    page_size: int,
    num_pages: int,
    hooks: Hooks,
    *,
    mesh: Mesh = ONE_RANK,
    replica: Callable[[int], Replica] | None = None,
    children: list[subprocess.Popen[bytes]] | None = None,
    apart: RanksApart | None = None,
    **more: Any,
) -> LoadedWorker:
    options = WorkerOptions(
        dtype="fp32",
        page_size=page_size,
        num_pages=num_pages,
        max_running=16,
        max_model_len=MAX_LEN,
        threads=1,
        hooks=hooks,
        **more,
    )
    if children is not None:
        return load_process_ranks(path, options, mesh, children)
    if apart is not None:
        return apart.load(path, options, mesh, replicas=replica)
    if mesh.world > 1:
        return load_local_ranks(path, options, mesh.cp, tp=mesh.tp, replicas=replica)
    return load_worker(path, options)


def close_enough(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within RELATIVE of the largest element; NaN never is."""
    if not len(ours):
        return True  # a page of the spine, without layers
    return bool((ours - theirs).abs().max() <= RELATIVE * theirs.abs().max())


class _Replica(RecordReader):
    """Made with the first record, when there is a leader to be equal to."""

    def __init__(self, leader: Callable[[], PrefixCache]) -> None:
        self._leader = leader

    def apply(self, log: bytes) -> None:
        if not hasattr(self, "_state"):
            cache = self._leader()
            super().__init__(
                CacheState(
                    cache.page_size,
                    cache.num_pages,
                    host_pages=cache.state.host.capacity,
                    window=cache.window,
                )
            )
        super().apply(log)


class Versions:
    """What steps have written into pages: digests by component and all tokens up to its end.

    Written on the worker's thread, read when nothing runs.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bytes], set[bytes]] = defaultdict(set)

    def note(self, component: int, tokens: bytes, page: bytes) -> None:
        self._seen[component, tokens].add(_digest(page))

    def has(self, component: int, tokens: bytes, page: bytes) -> bool:
        return _digest(page) in self._seen[component, tokens]

    def count(self, tokens: bytes) -> int:
        """How many different ones there were of the full component."""
        return len(self._seen[0, tokens])


def _digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()


class Recorder:
    """Sits before a worker and remembers which serial belongs to which tokens."""

    def __init__(self, loaded: LoadedWorker) -> None:
        self.worker = loaded.worker
        self.inits: dict[int, RowInit] = {}
        self.first_right: dict[int, int] = {}  # by serial: where a restart becomes right
        self.num_chunks = 0

    def submit(self, plan: StepPlan) -> None:
        self.inits.update((init.serial, init) for init in plan.admitted)
        self.num_chunks += sum(row.count > 1 for row in plan.rows)
        self.first_right.update((r.serial, r.write_from) for r in plan.rows if r.window_from)
        self.worker.submit(plan)

    def collect(self) -> StepResult:
        return self.worker.collect()

    def wait(self, timeout_s: float) -> bool:
        return self.worker.wait(timeout_s)

    def cancel(self, serial: int) -> None:
        self.worker.cancel(serial)

    def close(self) -> None:
        self.worker.close()


@dataclass
class Answer:
    """What became of one request."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0
    sources: CachedTokens = field(default_factory=CachedTokens)
    error: str | None = None


class Rig:
    """One engine without its processes. Close it, or use it as a context."""

    def __init__(
        self,
        path: Path,
        *,
        page_size: int,
        num_pages: int,
        prefix_cache: bool = True,
        overlap: bool = True,
        max_prefill_tokens: int = MAX_LEN,
        max_running: int = 8,
        host_pages: int = 0,
        tiers: TierConfig | None = None,
        store: Path | PageStore | None = None,
        transfer_hooks: TransferHooks | None = None,
        window_pages: int | None = None,
        window_host_pages: int | None = None,
        checkpoint: int = 0,
        kernels: str = "auto",
        ranks: int = 1,
        tp: int = 1,
        placement: str = "striped",
        processes: bool = False,
        kv_dtype: str = "auto",
        remote: RemoteWays = IN_PLACE,
        apart: bool = False,
        verify: bool = False,
        digest_every: int = 1,
        replicas: ReplicaConfig | None = None,
    ) -> None:
        """With `ranks`, threads of this process that share all these pages, each of `tp` parts; or
        `processes`, of which only rank 0 tells its logits, and which page it has made. `apart`:
        threads that share no memory, as on several hosts; nobody sees there which page a step has
        made."""
        self._apart = RanksApart() if apart else None
        mesh = Mesh(tp=tp, cp=ranks)
        if read_model_config(path).mla is not None:
            ranks *= tp  # that own pages
        self.page_size = page_size
        self.versions = versions_of(path, page_size, kv_dtype)
        self._sequences: dict[int, bytearray] = {}  # tokens by serial
        self.logits: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self._lock = threading.Lock()  # ranks capture at the same time
        self._children: list[subprocess.Popen[bytes]] = []
        hooks = Hooks(capture_logits=self._capture, nan_fill=True)
        if window_pages is not None:
            window_pages //= ranks
        self.loaded = _load(
            path,
            page_size,
            num_pages // ranks,
            hooks,
            mesh=mesh,
            replica=self._replica,
            children=self._children if processes else None,
            apart=self._apart,
            inline=not overlap,
            host_pages=host_pages,
            transfer_hooks=transfer_hooks,
            window_pages=window_pages,
            window_host_pages=window_host_pages,
            kernels=kernels,
            kv_dtype=kv_dtype,
        )
        self.recorder = Recorder(self.loaded)
        self.ranks = ranks
        self.sees_all = not (processes or apart)
        self.cache = PrefixCache(
            page_size=page_size,
            num_pages=(num_pages // ranks,) * ranks,
            placement=placement,
            host=HostTier(pages=host_pages, exclusive=is_exclusive(num_pages, host_pages)),
            enabled=prefix_cache,
            record_freed=True,
            window=self._window(checkpoint),
        )
        if replicas is not None:
            self.cache.keep_replicas(replicas)
        if isinstance(self.loaded.worker, RankedWorker):
            log = RecordWriter(self.cache.leader.log, self.cache.state, digest_every=digest_every)
            free = log.free_by_pool if verify else None
            self.loaded.worker.connect(RankHooks(log=log.take, free=free, reap=self._reap))
        config = SchedulerConfig(
            max_model_len=MAX_LEN,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            overlap=overlap,
        )
        self.clock = MonotonicClock()  # deadlines of storage are real; nothing else looks at it
        self._model_path = path
        self._store = open_storage(str(store), STORE_BYTES) if isinstance(store, Path) else store
        chooser = RemoteChooser(remote)
        self.scheduler = Scheduler(config, self.cache, self._controller(tiers), chooser)
        self.loop = EngineLoop(self.scheduler, self.recorder, self.clock, self._emit)
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_idle()
        if self._store is not None and self.loop.dead is None:
            assert self.scheduler.tiers.flush(60.0) == 0  # pages of all ranks, while they live
        if isinstance(self.loaded.worker, RankedWorker):
            self.loaded.worker.farewell()
        self.recorder.close()
        if self.loaded.transfers is not None:
            self.loaded.transfers.close()

    def _reap(self) -> None:
        assert all(child.wait(30) == 0 for child in self._children)

    def _replica(self, _rank: int) -> Replica:
        """A rank's copy of the cache, whose digest is compared in every step."""
        return _Replica(lambda: self.cache)

    def _window(self, checkpoint: int) -> WindowConfig | None:
        model = self.loaded.config
        if model.window is None:
            return None
        return WindowConfig(
            tokens=model.window,
            layers=len(model.component_layers[1]),
            pages=self.loaded.num_pages[1:] * self.ranks,
            host_pages=self.loaded.hosts[1].num_pages if self.loaded.hosts else 0,
            checkpoint=checkpoint,
        )

    def _controller(self, config: TierConfig | None) -> TierController | None:
        if self.loaded.transfers is None:
            return None
        specs = self.loaded.specs
        page_bytes, window_page_bytes = (*(s.page_bytes for s in specs), 0)[:2]
        config = replace(
            config or TierConfig(), page_bytes=page_bytes, window_page_bytes=window_page_bytes
        )
        if self._store is None:
            return TierController(self.cache, self.loaded.transfers, self.clock, config)
        storage = self.loaded.transfers.storage
        storage.attach(self._store)
        layouts = [host.layout for host in self.loaded.hosts]
        window = layouts[1] if len(layouts) > 1 else None
        facts = key_facts(
            self._model_path,
            self.loaded.config,
            layouts[0],
            window=window,
            weight_quantisation="none",
        )
        keys = StorageKeys(
            facts=facts, attached=lambda: storage.attached, take_gone=storage.take_gone
        )
        return TierController(self.cache, self.loaded.transfers, self.clock, config, keys)

    def read_page(self, ref: int, component: int = 0) -> bytes:
        """A copy of a page's bytes, wherever they are; nothing may run."""
        if self._apart is not None:
            return self._apart.read_page(ref, component)
        return self.loaded.worker.read_page(ref, component)

    def add(self, prompt: list[int], max_tokens: int, *, salt: str | None = None) -> str:
        """Queue a greedy request; returns its id."""
        request_id = f"r{len(self.answers)}"
        self.answers[request_id] = Answer(prompt)
        namespace = NAMESPACE if salt is None else make_namespace(model="tiny", salt=salt)
        self.loop.add(
            GenerateRequest(
                request_id=request_id,
                tokens=tokens_to_bytes(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
                namespace=namespace,
            )
        )
        return request_id

    def ask(self, prompt: list[int], max_tokens: int, *, salt: str | None = None) -> Answer:
        """One request, to its end, on an engine that has nothing else to do."""
        request_id = self.add(prompt, max_tokens, salt=salt)
        self.loop.run_until_idle()
        return self.answers[request_id]

    def _capture(self, serial: int, start: int, logits: torch.Tensor) -> None:
        with self._lock:
            for i, row in enumerate(logits):
                self.logits[serial][start + i] = row.clone()
            if self._apart is None:
                self._note_pages(serial, start, start + len(logits))

    def _note_pages(self, serial: int, start: int, end: int) -> None:
        """On the worker's thread, right after a forward pass: the pages that it has completed."""
        worker = self.loaded.worker
        own = worker._own if isinstance(worker, RankedWorker) else worker
        init, tables = self.recorder.inits[serial], own._runner._tables
        sequence = self._sequences.setdefault(serial, bytearray(init.tokens))
        if start == len(sequence) // TOKEN_BYTES:  # a decode: its input is not in the prompt
            sequence += int(tables._last_token[init.row]).to_bytes(TOKEN_BYTES, "little")
        size = self.page_size
        for page in range(start // size, end // size):
            tokens = bytes(sequence[: (page + 1) * size * TOKEN_BYTES])
            for component, pool in enumerate(self.loaded.pools):
                slot = int(tables._pages[component, init.row, page])
                self.versions.note(component, tokens, pool.read_page(slot))

    def _emit(self, chunks: object) -> None:
        for chunk in chunks:  # type: ignore[attr-defined]
            self._take(chunk)

    def _take(self, chunk: OutputChunk) -> None:
        answer = self.answers[chunk.request_id]
        answer.tokens += chunk.tokens
        answer.cached, answer.sources = chunk.cached.total, chunk.cached
        answer.finish = chunk.finish or answer.finish
        answer.error = chunk.error or answer.error


T = TypeVar("T")


class _Known(Generic[T]):
    """What was found for sequences of tokens, which holds for their beginnings as well."""

    def __init__(self) -> None:
        self._found: list[tuple[bytes, T]] = []

    def get(self, tokens: bytes, find: Callable[[], T]) -> T:
        """Of `tokens`, or of some that begin so; else what `find` finds, from now on known."""
        for known, found in self._found:
            if known.startswith(tokens):
                return found
        self._found.append((tokens, find()))
        return self._found[-1][1]


class Cold:
    """Answers and logits with nothing cached; remembered by sequence. `tp`: of a row of so many
    ranks, whose sums differ from one rank's in their last bits.

    Attention is causal: one pass over a sequence is the pass over each of its beginnings, too.
    """

    def __init__(self, path: Path, *, tp: int = 1, **options: Any) -> None:
        self._path, self._options, self._mesh = path, options, Mesh(tp=tp)
        shape = {"page_size": 16, "num_pages": MAX_LEN // 16 + 1, "prefix_cache": False}
        self._rig = Rig(path, tp=tp, **shape, **options)
        self._passes: _Known[torch.Tensor] = _Known()
        self._pages: dict[int, _Known[Pages]] = defaultdict(_Known)  # by page size, as
        self._bare: dict[int, LoadedWorker] = {}  # the audit's workers
        self._steps = itertools.count()

    def close(self) -> None:
        """End its ranks; before the interpreter ends, if there are several."""
        for worker in (self._rig.recorder, *(bare.worker for bare in self._bare.values())):
            worker.close()

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy continuation."""
        return self._rig.ask(prompt, max_tokens).tokens

    def chooses(self, prompt: list[int], tokens: list[int]) -> bool:
        """Whether the greedy continuation begins with `tokens`: each is the best one after those
        before it, so by induction all of them would have been taken."""
        best = self.logits(tuple(prompt + tokens)).argmax(dim=-1).tolist()
        return tokens == best[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]

    def logits(self, sequence: tuple[int, ...]) -> torch.Tensor:
        """Logits (len(sequence), vocab) of one pass over all of it."""
        found = self._passes.get(tokens_to_bytes(sequence), lambda: self._logits(sequence))
        return found[: len(sequence)]

    def _logits(self, sequence: tuple[int, ...]) -> torch.Tensor:
        self._rig.logits.clear()
        self._rig.ask(list(sequence), 1)
        (by_position,) = self._rig.logits.values()
        return torch.stack([by_position[i] for i in range(len(sequence))])

    def page_bytes(self, sequence: list[int], page_size: int) -> list[list[torch.Tensor]]:
        """KV of every full page of `sequence` as numbers, by component."""
        pages = self.raw_pages(sequence, page_size)
        return [[_floats(page) for page in each] for each in pages]

    def raw_pages(self, sequence: list[int], page_size: int) -> Pages:
        """The bytes of every full page of `sequence`, by component, computed from nothing: the
        audit's reference. A worker alone, in one chunk: no cache that could let go of window
        pages."""
        num_pages = len(sequence) // page_size
        tokens = tokens_to_bytes(sequence[: num_pages * page_size])
        found = self._pages[page_size].get(tokens, lambda: self._compute(tokens, page_size))
        return [each[:num_pages] for each in found]

    def _compute(self, tokens: bytes, page_size: int) -> Pages:
        loaded, count = self._bare_worker(page_size), len(tokens) // TOKEN_BYTES
        components = range(len(loaded.specs))
        refs = np.arange(count // page_size + 1, dtype=np.int64)
        init = RowInit(
            row=0,
            serial=0,
            sampling=SamplingParams(),
            seed=0,
            stop_ids=(),
            tokens=tokens,
            num_prompt_tokens=count,
        )
        row = RowPlan(row=0, serial=0, start=0, count=count, tokens=tokens, sample=False)
        plan = StepPlan(
            step=next(self._steps),
            rows=(row,),
            freed_pages=refs,  # what the sequence before it has left there is poison
            freed_window_pages=refs,
            admitted=(init,),
            table_updates=tuple(
                PageTableUpdate(row=0, first_page=0, refs=refs, component=c) for c in components
            ),
        )
        loaded.worker.submit(plan)
        loaded.worker.collect()
        return [[loaded.worker.read_page(p, c) for p in refs[:-1]] for c in components]

    def _bare_worker(self, page_size: int) -> LoadedWorker:
        if page_size not in self._bare:
            options = {**self._options, "inline": True}
            shape = (page_size, MAX_LEN // page_size + 1, Hooks(nan_fill=True))
            self._bare[page_size] = _load(self._path, *shape, mesh=self._mesh, **options)
        return self._bare[page_size]


def _floats(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy())


def read_page(rig: Rig, ref: int, component: int = 0) -> torch.Tensor:
    """One page's KV as fp32, flat."""
    return _floats(rig.read_page(ref, component))


def longest_first(rig: Rig) -> list[tuple[str, Answer]]:
    """All answers by name: those of a chat are beginnings of its last one, which is asked first."""
    return sorted(rig.answers.items(), key=lambda x: -len(x[1].prompt) - len(x[1].tokens))


def check_tokens(rig: Rig, cold: Cold) -> None:
    """Every finished answer is cold's, and every aborted one is the beginning of it."""
    for name, answer in longest_first(rig):
        assert answer.error is None, f"{name} failed: {answer.error}"
        assert cold.chooses(answer.prompt, answer.tokens), f"{name} differs from cold"


def check_logits(
    rig: Rig, cold: Cold, close: Callable[[torch.Tensor, torch.Tensor], bool] = close_enough
) -> int:
    """Compare every captured position with cold's; returns how many there were."""
    num_compared = 0
    for serial, by_position in rig.logits.items():
        init = rig.recorder.inits[serial]
        prompt = tokens_of(init)[: init.num_prompt_tokens]
        same = [a.prompt + a.tokens for a in rig.answers.values() if a.prompt == prompt]
        sequence = max(same, key=len)  # greedy: of one prompt they are beginnings of one another
        expected = cold.logits(tuple(sequence))
        first = rig.recorder.first_right.get(serial, 0)
        for position, logits in by_position.items():
            if position < first or position >= len(sequence):
                continue  # of a restart; the wasted row of a request that had ended
            assert close(logits, expected[position]), f"serial {serial} at {position}"
            num_compared += 1
    return num_compared


def tokens_of(init: RowInit) -> list[int]:
    """The tokens a row was started with."""
    return np.frombuffer(init.tokens, dtype="<i4").tolist()


def check_pages(rig: Rig, cold: Cold) -> int:
    """The audit: recompute every leaf's path and compare every page of it; every copy is, to the
    bit, what was computed once. Returns how many pages were compared."""
    num_compared = 0
    for leaf, packed, places in leaves(rig):
        tokens = np.frombuffer(packed, dtype="<i4").tolist()
        for component, pages in enumerate(cold.page_bytes(tokens, rig.page_size)):
            for page, ((node, number), expected) in enumerate(zip(places, pages, strict=True)):
                copies = copies_of(rig, node, number, component)
                assert copies or component or rig.apart, f"page {page} of {leaf} is nowhere"
                prefix = packed[: (page + 1) * rig.page_size * TOKEN_BYTES]
                for place, held in copies.items():
                    name = f"page {page} of {leaf}, component {component}, in {place}"
                    assert close_enough(held, expected), f"{name} is wrong"
                    made = rig.versions.has(component, prefix, held.numpy().tobytes())
                    assert made or not rig.sees_all, f"nobody computed {name}"
                    num_compared += 1
    return num_compared


def leaves(rig: Rig) -> Iterator[tuple[Any, bytes, list[tuple[Any, int]]]]:
    """Every leaf: the tokens from the root to its end, and the (node, number) of each page."""
    tree = rig.cache.state.tree
    for leaf in [n for n in tree.nodes.values() if n is not tree.root and not n.children]:
        path = []
        node = leaf
        while node is not tree.root:
            path.append(node)
            node = node.parent
        path.reverse()
        places = [(node, page) for node in path for page in range(node.num_pages)]
        yield leaf, b"".join(n.key for n in path), places


def copies_of(rig: Rig, node: Any, page: int, component: int = 0) -> dict[str, torch.Tensor]:
    """A page of a node wherever it is, by place, as numbers."""
    return {place: _floats(data) for place, data in raw_copies(rig, node, page, component).items()}


def raw_copies(rig: Rig, node: Any, page: int, component: int = 0) -> dict[str, bytes]:
    """A page of a node wherever it is, by place; window state may be nowhere."""
    out = {}
    held = node.extra[component - 1] if component else node
    if held.refs and (ref := held.ref_list()[page]) != ABSENT:
        out[f"slot {slot_of(ref)}"] = rig.read_page(ref, component)
    if held.host and (slot := held.host_list()[page]) != ABSENT:
        out[f"host slot {slot}"] = rig.loaded.hosts[component].read_page(slot)
    return out


def settle(rig: Rig) -> None:
    """Let the host slots come back that storage may still touch after its deadline.

    The loop is idle without them. One that never comes back is a leak: the invariants say so.
    """
    tiers, end_s = rig.scheduler.tiers, rig.clock.now_s() + SETTLE_S
    while tiers is not None and tiers.stats().held_host_pages and rig.clock.now_s() < end_s:
        rig.loaded.transfers.wait(0.01)
        rig.loop.step()


def check_all(rig: Rig, cold: Cold) -> None:
    """Tokens, logits, invariants at idle, and page bytes."""
    rig.loop.run_until_idle()
    check_tokens(rig, cold)
    assert check_logits(rig, cold) > 0
    settle(rig)
    check_invariants(rig.cache, idle=True)
    check_pages(rig, cold)
