"""The worker's contract: order, futures, rows, failures, memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phloem.config.checkpoint import read_model_config
from phloem.core.errors import ConfigError, EngineDead
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.refs import make_ref
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.kv.spec import KVDtype
from phloem.models import native_base
from phloem.worker import Hooks, WorkerOptions, activation_bytes, forward, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.models.driver import Driver, load

PAGE = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, length).tolist()


def generate(driver: Driver, row: int, ids: list[int], count: int, **admit: Any) -> list[int]:
    """A whole request alone: one chunk, then decodes."""
    driver.admit(row, ids, **admit)
    driver.step(driver.chunk(row, ids, 0, len(ids), sample=True))
    for _ in range(count - 1):
        driver.step(driver.decode(row))
    return driver.sampled[row]


SAMPLED = SamplingParams(
    temperature=1.5,
    top_p=0.95,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    max_tokens=100,
)


def test_sampling_ignores_batch_mates_and_chunking(path):
    """A seeded request alone, and in a batch whose other rows come and go."""
    ids = prompt(11)
    alone = generate(Driver(load(path, page_size=PAGE)), 0, ids, 12, sampling=SAMPLED, seed=5)
    driver = Driver(load(path, page_size=PAGE))
    driver.admit(3, ids, sampling=SAMPLED, seed=5)
    driver.admit(1, prompt(30, 1))
    driver.step(driver.chunk(3, ids, 0, 4), driver.chunk(1, prompt(30, 1), 0, 9))
    last = driver.chunk(3, ids, 4, 11, sample=True)
    driver.step(driver.chunk(1, prompt(30, 1), 9, 30, sample=True), last)
    for i in range(11):
        driver.step(driver.decode(3), *([driver.decode(1)] if i % 2 else []))
    assert driver.sampled[3] == alone


def test_a_retracted_request_continues_as_if_nothing_had_happened(path):
    """It comes back with what it had generated: penalties count it, seeds go on."""
    ids = prompt(11)
    whole = generate(Driver(load(path, page_size=PAGE)), 0, ids, 12, sampling=SAMPLED, seed=5)
    driver = Driver(load(path, page_size=PAGE))
    done = list(generate(driver, 0, ids, 5, sampling=SAMPLED, seed=5))
    again = ids + done
    driver.admit(2, again, sampling=SAMPLED, seed=5, num_prompt_tokens=len(ids))
    driver.sampled[2] = done
    chunk = driver.chunk(2, again, 0, len(again), sample=True)
    resumed = RowPlan(
        row=2,
        serial=chunk.serial,
        start=0,
        count=chunk.count,
        tokens=chunk.tokens,
        sample=True,
        output_index=5,
    )
    driver.step(resumed)
    for _ in range(6):
        driver.step(driver.decode(2))
    assert driver.sampled[2] == whole


def init(row: int, serial: int, ids: list[int]) -> RowInit:
    return RowInit(
        row=row,
        serial=serial,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        stop_ids=(),
        tokens=tokens_to_bytes(ids),
        num_prompt_tokens=len(ids),
    )


def chunk(row: int, serial: int, ids: list[int]) -> RowPlan:
    return RowPlan(
        row=row, serial=serial, start=0, count=len(ids), tokens=tokens_to_bytes(ids), sample=True
    )


def future(row: int, serial: int, start: int, index: int) -> RowPlan:
    return RowPlan(
        row=row,
        serial=serial,
        start=start,
        count=1,
        tokens=None,
        sample=True,
        output_index=index,
    )


def table(row: int, *slots: int) -> PageTableUpdate:
    refs = np.array([make_ref(0, slot) for slot in slots], dtype=np.int64)
    return PageTableUpdate(row=row, first_page=0, refs=refs)


def open_worker(path: Path, **options: Any) -> Any:
    chosen = {"dtype": "fp32", "page_size": PAGE, "num_pages": 40, "max_running": 4, "threads": 1}
    return load_worker(path, WorkerOptions(**{**chosen, **options}))


def test_two_plans_in_flight_and_a_future_between_them(path):
    """The second plan is queued before the first one's token is known."""
    ids = prompt(6)
    want = generate(Driver(load(path, page_size=PAGE)), 0, ids, 2)
    worker = open_worker(path).worker
    first = StepPlan(
        step=1,
        rows=(chunk(2, 7, ids),),
        admitted=(init(2, 7, ids),),
        table_updates=(table(2, 9, 3),),
    )
    worker.submit(first)
    worker.submit(StepPlan(step=2, rows=(future(2, 7, 6, 1),)))
    results = [worker.collect(), worker.collect()]
    worker.close()
    assert [r.step for r in results] == [1, 2]
    assert [r.rows[0].token for r in results] == want
    assert {(r.rows[0].row, r.rows[0].serial) for r in results} == {(2, 7)}


def test_a_wasted_row_of_an_ended_request_does_no_harm(path):
    """Plan k+1 still carries the row; k+2 releases it and gives row and pages to another."""
    old, new = prompt(6), prompt(7, 1)
    want = generate(Driver(load(path, page_size=PAGE)), 0, new, 2)
    worker = open_worker(path, inline=True).worker
    plans = [
        StepPlan(
            step=1,
            rows=(chunk(0, 1, old),),
            admitted=(init(0, 1, old),),
            table_updates=(table(0, 5, 6),),
        ),
        StepPlan(step=2, rows=(future(0, 1, 6, 1),)),
        StepPlan(
            step=3,
            rows=(chunk(0, 2, new),),
            released=(0,),
            freed_pages=np.array([make_ref(0, 5), make_ref(0, 6)]),
            admitted=(init(0, 2, new),),
            table_updates=(table(0, 6, 5),),
        ),
        StepPlan(step=4, rows=(future(0, 2, 7, 1),)),
    ]
    results = []
    for plan in plans:
        worker.submit(plan)
        results.append(worker.collect())
    assert [r.rows[0].token for r in results[2:]] == want
    worker.submit(StepPlan(step=5, rows=(future(0, 1, 7, 2),)))
    (stale,) = worker.collect().rows
    assert stale.error is not None, "a row that belongs to another serial gives no token"


def test_a_poisoned_row_fails_alone_and_its_pages_can_be_reused(path):
    """NaN in one request's pages: that row reports an error, its batch-mate is exact, and after
    it the unused ends of its pages leak nothing into the next tenant."""
    good, bad = prompt(6), prompt(7, 1)
    want = generate(Driver(load(path, page_size=PAGE)), 0, good, 4)
    loaded = open_worker(path, inline=True)
    worker = loaded.worker

    def run(**plan: Any) -> Any:
        worker.submit(StepPlan(step=0, **plan))
        return worker.collect().rows

    run(
        rows=(chunk(0, 1, good), chunk(1, 2, bad)),
        admitted=(init(0, 1, good), init(1, 2, bad)),
        table_updates=(table(0, 1, 2, 9), table(1, 3, 4, 8)),
    )
    loaded.pool.fill_nan(np.array([3, 4]))
    tokens = []
    for i in range(3):
        ok, failed = run(rows=(future(0, 1, 6 + i, 1 + i), future(1, 2, 7 + i, 1 + i)))
        tokens.append(ok.token)
        assert ok.error is None
        assert failed.error is not None
        assert "NaN" in failed.error
    assert tokens == want[1:]
    (again, mate) = run(
        rows=(chunk(1, 3, good), future(0, 1, 9, 4)),
        released=(1,),
        admitted=(init(1, 3, good),),
        table_updates=(table(1, 4, 3, 8),),
    )
    assert again.token == want[0]
    after = [run(rows=(future(1, 3, 6 + i, 1 + i), future(0, 1, 10 + i, 5))) for i in range(3)]
    assert [rows[0].token for rows in after] == want[1:]
    assert mate.error is None


def test_an_exception_in_a_step_comes_out_of_collect_and_ends_the_worker(path):
    worker = open_worker(path).worker
    ids = prompt(400)
    broken = StepPlan(step=1, rows=(chunk(0, 1, ids),), admitted=(init(0, 1, ids),))
    worker.submit(StepPlan(step=0, rows=(), table_updates=(table(0, *range(200)),)))
    worker.submit(broken)
    for _ in range(2):
        with pytest.raises(AssertionError, match="page 200 of a table of 128"):
            worker.collect()
    worker.close()


def test_close_drops_queued_plans_and_joins_the_thread(path):
    gate, inside = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        gate.wait(20)

    worker = open_worker(path, hooks=Hooks(on_layer=hold)).worker
    ids = prompt(5)
    worker.submit(
        StepPlan(
            step=1,
            rows=(chunk(0, 1, ids),),
            admitted=(init(0, 1, ids),),
            table_updates=(table(0, 1, 2),),
        )
    )
    worker.submit(StepPlan(step=2, rows=(future(0, 1, 5, 1),)))
    assert inside.wait(20)
    closer = threading.Thread(target=worker.close)
    closer.start()
    gate.set()
    closer.join(20)
    assert not closer.is_alive()
    assert worker.collect().step == 1  # given up at its first layer
    with pytest.raises(EngineDead):
        worker.collect()
    worker.close()


def test_a_step_that_nobody_waits_for_stops_at_the_next_layer(path):
    """Cancelled while it runs: fewer layers are computed, and the worker goes on."""
    inside, gate, beats = threading.Event(), threading.Event(), []

    def hold() -> None:
        beats.append(1)
        inside.set()
        gate.wait(20)

    loaded = open_worker(path, hooks=Hooks(on_layer=hold))
    worker, ids = loaded.worker, prompt(5)
    worker.submit(
        StepPlan(
            step=1,
            rows=(chunk(0, 7, ids),),
            admitted=(init(0, 7, ids),),
            table_updates=(table(0, 1, 2),),
        )
    )
    assert inside.wait(20)
    assert not worker.wait(0.0)
    worker.cancel(7)
    gate.set()
    assert worker.wait(20)
    (row,) = worker.collect().rows
    assert row.error is not None
    assert len(beats) < loaded.config.num_layers
    worker.submit(
        StepPlan(
            step=2,
            rows=(chunk(0, 8, ids),),
            released=(0,),
            admitted=(init(0, 8, ids),),
            table_updates=(table(0, 1, 2),),
        )
    )
    assert worker.collect().rows[0].error is None
    worker.close()


def test_a_step_goes_on_for_those_who_wait(path):
    """Two rows, one cancelled: the other one's token comes, and is the same as ever."""
    tokens = []
    for cancelled in ((), (7,)):
        worker = open_worker(path, inline=True).worker
        for serial in cancelled:
            worker.cancel(serial)
        ids = prompt(5)
        worker.submit(
            StepPlan(
                step=1,
                rows=(chunk(0, 7, ids), chunk(1, 8, ids)),
                admitted=(init(0, 7, ids), init(1, 8, ids)),
                table_updates=(table(0, 1, 2), table(1, 3, 4)),
            )
        )
        tokens.append(worker.collect().rows[1].token)
    assert tokens[0] == tokens[1] >= 0


@pytest.mark.parametrize("short", [True, False])
def test_the_heartbeat_beats_once_per_layer_or_once_in_a_short_pass(path, monkeypatch, short):
    beats = []
    if not short:
        monkeypatch.setattr(native_base, "_SHORT_PASS_BYTES", 0)
    loaded = open_worker(path, inline=True, hooks=Hooks(on_layer=lambda: beats.append(1)))
    ids = prompt(5)
    loaded.worker.submit(
        StepPlan(
            step=1,
            rows=(chunk(0, 1, ids),),
            admitted=(init(0, 1, ids),),
            table_updates=(table(0, 1, 2),),
        )
    )
    loaded.worker.collect()
    one_call = short and loaded.kernels == "native"
    assert len(beats) == (1 if one_call else loaded.config.num_layers)


def test_an_empty_plan_only_updates_tables(path):
    worker = open_worker(path, inline=True).worker
    worker.submit(StepPlan(step=3, rows=()))
    assert worker.collect().rows == ()


def test_audit_reads_page_bytes(path):
    """Two rows that computed the same tokens in different pages hold the same bytes."""
    driver = Driver(load(path, page_size=PAGE))
    ids = prompt(8)
    for row in (0, 1):
        driver.admit(row, ids)
        driver.step(driver.chunk(row, ids, 0, 8))
    first, second = driver.refs(0, 0), driver.refs(1, 0)
    for i in range(2):
        data = driver.worker.read_page(int(first[i]))
        assert data == driver.worker.read_page(int(second[i]))
        assert len(data) == driver.loaded.page_bytes
        assert np.isfinite(np.frombuffer(data, dtype=np.float32)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "unknown dtype"),
        ({"device": "tpu9"}, "unknown device"),
        ({"num_pages": 0}, "num_pages must be at least 1"),
        ({"num_pages": None}, "either num_pages or kv_bytes"),
        ({"num_pages": None, "kv_bytes": 10}, "hold no KV page"),
        ({"max_model_len": 4096}, "max_model_len must be between 1 and the model's 512"),
        ({"max_running": 0}, "max_running"),
        ({"threads": 0}, "threads"),
        ({"page_size": 0}, "page_size"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(path, options, message):
    with pytest.raises(ConfigError, match=message):
        open_worker(path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_cuda_without_a_gpu_is_refused(path):
    with pytest.raises(ConfigError, match="finds no usable GPU"):
        open_worker(path, device="cuda")


def test_kv_budget_buys_whole_pages(path):
    loaded = open_worker(path, num_pages=None, kv_bytes=10_000, inline=True)
    assert loaded.num_pages == (10_000 // loaded.page_bytes,) == (loaded.pool.num_pages,)
    assert loaded.page_bytes == 2 * 3 * 2 * 16 * 4 * PAGE


def test_the_activation_bound_is_linear_and_holds_logits_of_few_rows(path):
    config = open_worker(path, inline=True).config
    one = activation_bytes(config, 8192, dtype=KVDtype.BF16, max_running=4)
    two = activation_bytes(config, 16384, dtype=KVDtype.BF16, max_running=4)
    assert one < two < 2 * one


def test_kernels_are_chosen_by_what_they_can_compute(path, monkeypatch):
    """Whatever the native ones lack: auto falls back to torch, native says what it is."""
    monkeypatch.setattr(forward, "native_fits", lambda config: "a model that can fly")
    config = read_model_config(path)
    assert forward.choose_kernels("auto", torch.device("cpu"), config) == "torch"
    with pytest.raises(ConfigError, match="native needs a model that can fly; use --kernels torch"):
        forward.choose_kernels("native", torch.device("cpu"), config)
