"""Peak memory of a step stays below what `activation_bytes` states."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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

# In a process of its own: the peak of resident memory belongs to a process.
SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from phloem.core.plan import PageTableUpdate, RowInit, RowPlan, StepPlan
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.worker import WorkerOptions, load_worker

COUNT = int(sys.argv[2])

def status(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024

options = WorkerOptions(dtype=sys.argv[3], num_pages=1 + COUNT // 16, inline=True, threads=1,
                        max_prefill_tokens=COUNT, max_running=1, kernels=sys.argv[4])
loaded = load_worker(Path(sys.argv[1]), options)
refs = np.arange(COUNT // 16)
init = RowInit(row=0, serial=1, sampling=SamplingParams(logprobs=20), seed=0, stop_ids=(),
               tokens=b"", num_prompt_tokens=0)

def step(count, sample, **extra):
    ids = tokens_to_bytes([5] * count)
    row = RowPlan(row=0, serial=1, start=0, count=count, tokens=ids, sample=sample)
    loaded.worker.submit(StepPlan(step=0, rows=(row,), **extra))
    return loaded.worker.collect()

step(32, True, admitted=(init,), table_updates=tuple(
    PageTableUpdate(row=0, first_page=0, refs=refs, component=c) for c in range(len(loaded.pools))))
for pool in loaded.pools:  # touch every page: pools are not what is measured
    pool.buffer.data[:-1] = 1.0
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
assert step(COUNT, True).rows[0].logprob is not None
print(json.dumps({"grown": status("VmHWM") - before, "bound": loaded.activation_bytes}))
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


@pytest.mark.parametrize(
    ("family", "kernels", "at_least"),
    # the bound is no fantasy either
    [
        ("llama", "torch", 0.25),
        ("llama", "native", 0.1),
        ("gemma3", "torch", 0.25),
        ("v3", "torch", 0.25),
        ("v3", "native", 0.1),
    ],
)
def test_a_maximal_prefill_with_logprobs_stays_within_its_bound(
    tmp_path: Path, family, kernels, at_least
):
    """6,144 tokens over a vocabulary of 50,000: their logits alone would be 1.2 GB."""
    sizes = {**_SIZES, "vocab_size": 50_000, "max_position_embeddings": 8192}
    sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 512}
    if kernels == "native":
        native_library()
    torch.manual_seed(0)
    if family == "llama":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    elif family == "v3":
        make_latent(family, tmp_path, **sizes)
    else:
        make_windowed(family, tmp_path, window=1000, **sizes, layer_types=WINDOW_AND_FULL)
    args = [sys.executable, "-c", SCRIPT, str(tmp_path), "6144", "fp32", kernels]
    out = subprocess.run(args, capture_output=True, text=True, timeout=100, check=False)
    assert out.returncode == 0, out.stderr
    figures = json.loads(out.stdout.splitlines()[-1])
    most = 120 << 20 if family == "v3" else 60 << 20  # absorbed queries are wide
    assert figures["bound"] * at_least < figures["grown"] < figures["bound"] < most, figures
