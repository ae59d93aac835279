"""One rank on a GPU, and several on GPUs of this machine: `make test-gpu`. Skipped where there are
fewer than a test needs.

None of this has run yet: no GPU has been at hand. What can be played without one is in
tests/groups/test_nccl.py, tests/worker/test_gpu_steps.py and tests/engine/test_apart_ranks.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phloem.core.errors import EngineDead
from phloem.core.group import Reduce
from phloem.core.request import SamplingParams
from phloem.engine import LLM
from phloem.groups import TorchGroup
from tests.contract.test_groups import filled, in_threads, same
from tests.e2e.test_hosts import Launched
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_ranks import GREEDY, PROMPTS, ask_until_loaded, ids, rank_pids
from tests.models.checkpoints import make_checkpoint, make_latent, make_windowed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
one_gpu, two_gpus = (
    pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} of CUDA's GPUs")
    for count in (1, 2)
)

KINDS = ["llama", "gemma3", "v3-yarn"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gpus")
    make = {"gemma3": make_windowed, "v3-yarn": make_latent}.get(request.param, make_checkpoint)
    make(request.param, folder, **({"window": 16} if request.param == "gemma3" else {}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def open_llm(model: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "fp32", "page_size": 4, "num_pages": 80, "max_model_len": 128}
    return LLM(str(model), **{**defaults, "max_prefill_tokens": 24, **settings})


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """One rank's, on the CPU."""
    with open_llm(model, prefix_cache=False) as llm:
        return [ids(llm, [prompt])[0] for prompt in PROMPTS]


@one_gpu
def test_one_gpu_answers_as_the_cpu(model: Path, expected: list[tuple[int, ...]]) -> None:
    with open_llm(model, device="cuda") as llm:
        assert ids(llm, PROMPTS) == expected
        assert ids(llm, PROMPTS) == expected


@two_gpus
@pytest.mark.parametrize("remote_kv", ["gather_kv", "send_q", "auto"])
def test_two_gpus_answer_as_one_rank(
    model: Path, expected: list[tuple[int, ...]], remote_kv: str
) -> None:
    """In chunks, then from cached pages of both, replicas included."""
    with open_llm(model, device="cuda", cp=2, remote_kv=remote_kv, verify_collectives=True) as llm:
        for _ in range(3):
            assert ids(llm, PROMPTS) == expected
        again = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [one.token_ids for one in again] == expected
        assert all(one.cached.device > 0 for one in again)


@two_gpus
def test_two_gpus_divide_a_model(model: Path, expected: list[tuple[int, ...]]) -> None:
    with open_llm(model, device="cuda", tp=2) as llm:
        assert ids(llm, PROMPTS) == expected
        assert ids(llm, PROMPTS) == expected


@two_gpus
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "fp4"])
def test_small_pages_travel_between_gpus(tmp_path: Path, kv_dtype: str) -> None:
    """Two ranks against one with the same pages."""
    make_checkpoint("llama", tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    answers = []
    for settings in ({}, {"cp": 2, "remote_kv": "gather_kv"}, {"cp": 2, "remote_kv": "send_q"}):
        with open_llm(tmp_path, device="cuda", kv_dtype=kv_dtype, **settings) as llm:
            answers.append(ids(llm, PROMPTS))
    assert answers[0] == answers[1] == answers[2]


@two_gpus
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_a_directory_written_by_two_gpus_is_read_by_one_cpu(tmp_path: Path, axis: str) -> None:
    """Pages, or heads of them, of both GPUs go to the host and on to storage; and back from the
    host."""
    checkpoint = tmp_path / "model"
    make_checkpoint("llama", checkpoint)
    byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    with open_llm(checkpoint, prefix_cache=False) as llm:
        wanted = [ids(llm, [prompt])[0] for prompt in PROMPTS]
    tiers = {"storage": str(tmp_path / "kept"), "storage_size": "32MB", "host_memory": "1MB"}
    ranks: dict[str, Any] = {axis: 2}
    with open_llm(checkpoint, device="cuda", **ranks, **tiers) as llm:
        assert ids(llm, PROMPTS) == wanted
        assert ask_until_loaded(llm, wanted)
    with open_llm(checkpoint, **tiers) as llm:
        found = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [one.token_ids for one in found] == wanted
        assert all(one.cached.storage > 0 for one in found)


@two_gpus
def test_a_killed_rank_ends_the_others(model: Path) -> None:
    """In the middle of an answer, while the other GPU waits for it. Red if the engine hangs."""
    before = set(rank_pids(os.getpid()))
    with open_llm(model, device="cuda", cp=2, remote_kv="gather_kv") as llm:
        (rank,) = set(rank_pids(os.getpid())) - before
        ids(llm, PROMPTS)
        killer = subprocess.Popen([sys.executable, "-c", f"import os; os.kill({rank}, 9)"])
        with pytest.raises(EngineDead, match="rank 1"):
            generate_for_ever(llm)
        killer.wait()
    assert set(rank_pids(os.getpid())) == before


def generate_for_ever(llm: LLM) -> None:
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    while True:
        llm.generate(PROMPTS, long)


@pytest.fixture
def launched(model: Path) -> Iterator[Launched]:
    made = Launched(model)
    yield made
    made.close()


@two_gpus
def test_torchrun_on_one_machine_gives_each_rank_a_gpu(launched: Launched) -> None:
    launched.torchrun(1, 2, "--device", "cuda", "--remote-kv", "gather_kv")
    launched.wait_ready()
    cold = [launched.ask(prompt)["choices"][0]["text"] for prompt in PROMPTS[:3]]
    warm = [launched.ask(prompt)["choices"][0]["text"] for prompt in PROMPTS[:3]]
    assert cold == warm
    launched.processes[0].send_signal(signal.SIGTERM)
    launched.statuses(60)  # torchrun itself ends with an error


@two_gpus
def test_exchanges_between_gpus_bring_the_right_bytes() -> None:
    """Uneven and empty sizes, two in flight, tensors of the CPU in between; sums in rank order."""
    store = dist.HashStore()

    def play(rank: int) -> None:
        device = torch.device("cuda", rank)
        group = TorchGroup.gloo(store, rank=rank, size=2)
        group.join_gpus(device)
        try:
            flights = []
            for turn in range(40):
                on = device if turn % 3 else torch.device("cpu")
                sizes = [[(turn * (a + 2 * b + 1)) % 7 * 100 for b in range(2)] for a in range(2)]
                parts = [filled(sizes[rank][to], torch.float32, turn, rank, to) for to in range(2)]
                wanted = [filled(sizes[by][rank], torch.float32, turn, by, rank) for by in range(2)]
                out = [torch.zeros_like(part, device=on) for part in wanted]
                flight = group.begin_all_to_all(out, [part.to(on) for part in parts])
                flights.append((flight, out, wanted))
                if len(flights) > 1:
                    check(*flights.pop(0))
            check(*flights.pop())
            total = filled(50, torch.float32, rank).to(device)
            group.all_reduce(total, Reduce.SUM)
            both = filled(50, torch.float32, 0) + filled(50, torch.float32, 1)
            assert same(total.cpu(), both)
        finally:
            group.close()

    def check(flight: Any, out: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        flight.finish()
        assert all(same(got.cpu(), want) for got, want in zip(out, wanted, strict=True))

    in_threads(2, play)
