"""`phloem bench profile`: where a step's time goes, as a table and as a trace.

Functions of both processes are wrapped from outside, through the seam where the engine process is
told what to build. Nothing of it exists in an engine that is not profiled.
"""

from __future__ import annotations

from phloem.bench.profile.run import ProfileOptions, run_profile

__all__ = ["ProfileOptions", "run_profile"]
