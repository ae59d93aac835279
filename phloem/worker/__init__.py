"""One rank's executor: runs step plans over a model and its pages."""

from __future__ import annotations

from phloem.worker.load import LoadedWorker, WorkerOptions, load_worker
from phloem.worker.memory import activation_bytes
from phloem.worker.pages import kv_specs
from phloem.worker.runner import CaptureLogits, Hooks, Runner
from phloem.worker.torch_worker import InlineWorker, TorchWorker

__all__ = [
    "CaptureLogits",
    "Hooks",
    "InlineWorker",
    "LoadedWorker",
    "Runner",
    "TorchWorker",
    "WorkerOptions",
    "activation_bytes",
    "kv_specs",
    "load_worker",
]
