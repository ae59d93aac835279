"""From a heartbeat to a verdict."""

from __future__ import annotations

import time

from phloem.engine.api import Health
from phloem.engine.heartbeat import LoopState
from phloem.engine.process import EngineProcess

__all__ = ["DEFAULT_HANG_S", "judge_health"]

# A layer of a maximal prefill chunk of a large model on a slow CPU takes tens of seconds.
DEFAULT_HANG_S = 60.0


def judge_health(
    process: EngineProcess, *, waiting_since_s: float | None, draining: bool, hang_s: float
) -> Health:
    """The engine's health now.

    `waiting_since_s`: when the front last sent a request, if any is unanswered. An engine that
    says it is idle while requests wait has hung just like one whose layers stand still.
    """
    code = process.returncode()
    if process.heartbeat.fd < 0 or code is not None:
        reason = "the engine process has ended" + ("" if code is None else f" (status {code})")
        return Health(
            alive=False,
            ready=False,
            idle=False,
            progress=0,
            since_progress_s=0.0,
            reason=reason,
            ended=True,
        )
    pulse = process.heartbeat.read()
    idle = pulse.state is LoopState.IDLE and waiting_since_s is None
    since_s = time.monotonic() - max(
        pulse.last_s,
        waiting_since_s if waiting_since_s and pulse.state is LoopState.IDLE else 0.0,
    )
    alive, reason = True, ""
    if pulse.state is LoopState.DEAD:
        alive, reason = False, "the engine process is ending"
    elif not idle and since_s > hang_s:
        alive, reason = False, f"no progress for {since_s:.0f} s"
    elif draining:
        reason = "draining"
    return Health(
        alive=alive,
        ready=alive and not draining,
        idle=idle,
        progress=pulse.progress,
        since_progress_s=max(since_s, 0.0),
        reason=reason,
    )
