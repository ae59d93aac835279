"""Peak memory of a step stays below what `activation_bytes` states."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from phloem.attention.remote_pages import HALVES, PageExchange, RankPool
from phloem.groups import local_groups
from phloem.kernels import KVBuffer
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.worker import staging_bytes
from tests.kernels.native_build import native_library
from tests.models.checkpoints import _SIZES, make_latent, make_windowed

WINDOW_AND_FULL = ["sliding_attention", "full_attention"]

# In a process of its own: the peak of resident memory belongs to a process. One for each model,
# all of them forks of one that has imported everything.
SCRIPT = """
import json, os, sys
from pathlib import Path
import numpy as np
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.worker import WorkerOptions, load_worker

COUNT = int(sys.argv[1])

def status(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024

def measure(path, kernels):
    options = WorkerOptions(dtype="fp32", num_pages=1 + COUNT // 16, inline=True, threads=1,
                            max_prefill_tokens=COUNT, max_running=1, kernels=kernels)
    loaded = load_worker(Path(path), options)
    refs = np.arange(COUNT // 16)
    init = RowInit(row=0, serial=1, sampling=SamplingParams(logprobs=20), seed=0, stop_ids=(),
                   tokens=b"", num_prompt_tokens=0)

    def step(number, count, sample, **extra):
        ids = tokens_to_bytes([5] * count)
        row = RowPlan(row=0, serial=1, start=0, count=count, tokens=ids, sample=sample)
        loaded.worker.submit(StepPlan(step=number, rows=(row,), **extra))
        return loaded.worker.collect()

    updates = [PageTableUpdate(row=0, first_page=0, refs=refs, component=c)
               for c in range(len(loaded.pools))]
    step(0, 32, True, admitted=(init,), table_updates=tuple(updates))
    for pool in loaded.pools:  # touch every page: pools are not what is measured
        pool.buffer.data[:-1] = 1.0
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    assert step(1, COUNT, True).rows[0].logprob is not None
    return {"grown": status("VmHWM") - before, "bound": loaded.activation_bytes}

for asked in sys.argv[2:]:
    child = os.fork()
    if not child:
        print(json.dumps(measure(*json.loads(asked))), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_of_all_pages_of_all_others_stay_within_their_bound(ranks: int) -> None:
    """What two halves take when a step reads everything, also while it grows to that."""
    spec = KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.BF16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        page_size=4,
    )
    pages = 50
    data = torch.zeros(pages + 1, 2, 3, 2, 4, 1, 8, dtype=torch.bfloat16)
    assert data[0].nbytes == spec.page_bytes
    group = local_groups(ranks)[0]
    exchange = PageExchange(RankPool(KVBuffer(data), 0, pages), group)
    wanted = [np.arange(ranks * pages) for _ in range(ranks)]
    wanted = [each[each // pages != rank] for rank, each in enumerate(wanted)]
    for share in (10, 2, 1):
        exchange.plan([each[: len(each) // share] for each in wanted], np.arange(0))
    staged = sum(exchange.staging(half).data.nbytes for half in range(HALVES))
    sent = (ranks - 1) * pages * spec.page_bytes // 3
    bound = staging_bytes([spec], [pages], ranks=ranks)
    assert staged + 2 * sent == bound
    window = replace(spec, retention=8)
    assert staging_bytes([window], [pages], ranks=ranks) > bound  # its own pages are staged too


# (family, kernels, the least share of the bound that is used: it is no fantasy either)
MODELS = [
    ("llama", "torch", 0.25),
    ("llama", "native", 0.1),
    ("gemma3", "torch", 0.25),
    ("v3", "torch", 0.25),
    ("v3", "native", 0.1),
]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, int]]:
    """How much a maximal prefill takes, and its bound, by family and kernels."""
    native_library()
    sizes = {**_SIZES, "vocab_size": 50_000, "max_position_embeddings": 8192}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 512}
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("memory")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    llama.save_pretrained(root / "llama")
    make_latent("v3", root / "v3", **sizes)
    windowed = {**sizes, "layer_types": WINDOW_AND_FULL}
    make_windowed("gemma3", root / "gemma3", window=1000, **windowed)
    asked = [json.dumps([str(root / family), kernels]) for family, kernels, _ in MODELS]
    args = [sys.executable, "-c", SCRIPT, "6144", *asked]
    out = subprocess.run(args, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stderr
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    return {(f, kernels): line for (f, kernels, _), line in zip(MODELS, lines, strict=True)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "kernels", "at_least"), MODELS)
def test_a_maximal_prefill_with_logprobs_stays_within_its_bound(
    figures: dict[tuple[str, str], dict[str, int]], family: str, kernels: str, at_least: float
) -> None:
    """6,144 tokens over a vocabulary of 50,000: their logits alone would be 1.2 GB."""
    found = figures[family, kernels]
    most = 120 << 20 if family == "v3" else 60 << 20  # absorbed queries are wide
    assert found["bound"] * at_least < found["grown"] < found["bound"] < most, found
