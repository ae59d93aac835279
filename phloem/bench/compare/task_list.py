"""The workloads by name."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.bench.compare.tasks import Decode, Prefill, SecondTurn, Task

__all__ = ["AGENT_TRACE", "QUICK_TASKS", "RESTART", "TASK_NAMES", "speed_tasks"]

AGENT_TRACE, RESTART = "agent_trace", "restart"
_BATCHES = (1, 8, 32)


def _tasks(num_tokens: int) -> list[Task]:
    prefills = [Prefill(length) for length in (512, 2048, 8000)]
    decodes = [Decode(batch, num_tokens=num_tokens) for batch in _BATCHES]
    busy = Decode(1, num_tokens=num_tokens, busy_core=True)
    return [*prefills, *decodes, busy, SecondTurn(1024), SecondTurn(4096)]


QUICK_TASKS = tuple(task.name for task in _tasks(1)[:6])
TASK_NAMES = (*(task.name for task in _tasks(1)), RESTART, AGENT_TRACE)


def speed_tasks(names: Sequence[str], *, num_tokens: int, longest: int) -> tuple[Task, ...]:
    """Those of `names` that one pair of servers answers and a context of `longest` has room for."""
    return tuple(
        task for task in _tasks(num_tokens) if task.name in names and _length(task) < longest
    )


def _length(task: Task) -> int:
    match task:
        case Prefill():
            return task.length
        case SecondTurn():
            return task.cached + task.new_tokens
        case _:
            return 1
