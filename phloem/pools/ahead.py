"""Memory got from the system ahead of its first use, in the background.

The first write to memory makes the system find and clear it: in a virtual machine this was a fifth
of the time of a short prompt.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_BYTES", "populate"]

# So much at most: the rest costs memory from its first use on.
MOST_BYTES = 1 << 30
_LEAST_BYTES = 16 << 20  # less is soon touched
_STEP_BYTES = 8 << 20  # whoever maps memory meanwhile waits for a step
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: contents stay as they are


def populate(memory: npt.NDArray[np.uint8]) -> threading.Thread | None:
    """Begin with the first MOST_BYTES of `memory` (n,), which may be in use; None: too little.

    The thread ends early where the system knows no such call.
    """
    size = min(memory.nbytes, MOST_BYTES)
    if size < _LEAST_BYTES:
        return None
    thread = threading.Thread(target=_populate, args=(memory, size), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(memory: npt.NDArray[np.uint8], size: int) -> None:
    page = 4096
    begin = -(-memory.ctypes.data // page) * page
    end = (memory.ctypes.data + size) // page * page
    with contextlib.suppress(OSError, AttributeError):  # no libc by that name, no such function
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(begin, end, _STEP_BYTES):
            if madvise(at, min(_STEP_BYTES, end - at), _POPULATE_WRITE) != 0:
                return
