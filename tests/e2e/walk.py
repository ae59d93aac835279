"""Who was called first, and when: a profile of one request through both processes.

The engine process is built by `build` below, which watches its threads; the front is watched by
the test itself. Both write lines of "time file:qualified name" for the first call of each function
of phloem (the monotonic clock is one for all processes of a machine).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from phloem.config import Config
from phloem.engine.core import BuildHooks
from phloem.engine.loop_core import LoopCore

__all__ = ["TRACE_ENV", "Watch", "build"]

TRACE_ENV = "PHLOEM_TEST_WALK"
_ROOT = str(Path(__file__).resolve().parents[2]) + "/"


class Watch:
    """Notes first calls, on every thread that is started or told to after `start`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._seen: set[str] = set()

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT + "phloem/"):
            return
        name = f"{code.co_filename.removeprefix(_ROOT)}:{code.co_qualname}"
        if name not in self._seen:
            self._seen.add(name)
            self._file.write(f"{time.monotonic():.9f} {name}\n")


def build(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    """A `CoreBuilder`: the real one, watched from its first thread on."""
    from phloem.engine.build import build_core

    watch = Watch(Path(os.environ[TRACE_ENV]))
    watch.start()
    return build_core(config, hooks, eos_ids)
