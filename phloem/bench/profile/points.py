"""What is timed, and which part of a step each belongs to."""

from __future__ import annotations

from typing import Any

from phloem.bench.profile.spans import Point

__all__ = [
    "ENGINE_POINTS",
    "FRONT_POINTS",
    "IDLE",
    "NATIVE_POINTS",
    "OUTSIDE_GROUPS",
    "STEP",
    "TORCH_POINTS",
]

STEP = "step"  # a whole step on the worker's thread
IDLE = "idle"
# What stands around the model; all other groups compute it.
OUTSIDE_GROUPS = ("scheduler", "log", "ipc", "detokenizer")


def _describe_step(args: tuple[Any, ...]) -> dict[str, int]:
    plan = args[1]
    return {"step": plan.step, "rows": len(plan.rows), "tokens": plan.num_tokens}


ENGINE_POINTS = (
    Point("phloem.engine.loop_core:LoopCore.step", "loop", "scheduler"),
    Point("phloem.sched.scheduler:Scheduler.plan", "plan", "scheduler"),
    Point("phloem.sched.scheduler:Scheduler.apply", "apply", "scheduler"),
    Point("phloem.replica.log:CommandLog.append", "append and apply", "log"),
    Point("phloem.worker.torch_worker:TorchWorker.wait", "waits for the worker", IDLE),
    Point("phloem.worker.runner:Runner.run", "rest", STEP, _describe_step),
    Point("phloem.worker.rows:RowTables.apply", "row tables", "inputs"),
    Point("phloem.worker.runner:build_inputs", "tensors", "inputs"),
    Point("phloem.worker.runner:sample", "sampler", "sampler"),
)

NATIVE_POINTS = (
    Point("phloem.attention.native:NativeAttention.plan", "attention plan", "inputs"),
    Point("phloem.kernels.native:NativeKernels.embedding", "embedding", "layers"),
    Point("phloem.kernels.native:NativeKernels.layers_forward", "all layers, one call", "layers"),
    Point("phloem.kernels.native:NativeKernels.layer_forward", "layers, one call each", "layers"),
    Point("phloem.models.native_base:NativeBase.logits", "output head", "head"),
)

TORCH_POINTS = (
    Point("phloem.attention.gather:GatherAttention.plan", "attention plan", "inputs"),
    Point("phloem.attention.gather:GatherAttention.write", "write K and V", "layers"),
    Point("phloem.attention.gather:GatherAttention.attend", "attention", "layers"),
    Point("phloem.kernels.torch_ops:TorchOps.linear", "linear", "layers"),
    Point("phloem.kernels.torch_ops:TorchOps.rms_norm", "norm", "layers"),
    Point("phloem.kernels.torch_ops:TorchOps.rope", "rope", "layers"),
    Point("phloem.kernels.torch_ops:TorchOps.silu_mul", "silu", "layers"),
    Point("phloem.models.decoder:Decoder.forward", "rest", "layers"),
    Point("phloem.models.decoder:Decoder.logits", "output head", "head"),
)

FRONT_POINTS = (
    Point("phloem.engine.channel:Channel.data_received", "receive, decode", "ipc"),
    Point("phloem.engine.assembly:TextAssembly.feed", "detokenizer", "detokenizer"),
)
