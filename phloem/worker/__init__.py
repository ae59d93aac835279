"""One rank's executor: runs step plans over a model and its pages; and one made of several."""

from __future__ import annotations

from phloem.worker.follower import Follower, Replica
from phloem.worker.load import LoadedWorker, WorkerOptions, load_worker
from phloem.worker.local_ranks import load_local_ranks
from phloem.worker.memory import activation_bytes, staging_bytes
from phloem.worker.pages import kv_specs, pool_layouts
from phloem.worker.peers import Peers, RankPlace
from phloem.worker.ranked import RankedWorker, RankHooks
from phloem.worker.runner import CaptureLogits, Hooks, Runner
from phloem.worker.sampled import SampledTokens
from phloem.worker.torch_worker import InlineWorker, TorchWorker
from phloem.worker.wire import Step, Wire, packed

__all__ = [
    "CaptureLogits",
    "Follower",
    "Hooks",
    "InlineWorker",
    "LoadedWorker",
    "Peers",
    "RankHooks",
    "RankPlace",
    "RankedWorker",
    "Replica",
    "Runner",
    "SampledTokens",
    "Step",
    "TorchWorker",
    "Wire",
    "WorkerOptions",
    "activation_bytes",
    "kv_specs",
    "load_local_ranks",
    "load_worker",
    "packed",
    "pool_layouts",
    "staging_bytes",
]
