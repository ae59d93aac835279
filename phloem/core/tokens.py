"""Token ids travel as bytes: little-endian int32, four bytes a token, from the tokenizer on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TOKEN_BYTES", "num_tokens", "tokens_from_bytes", "tokens_to_bytes"]

TOKEN_BYTES = 4
_DTYPE = np.dtype("<i4")


def tokens_to_bytes(ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Pack token ids. Raises OverflowError for an id outside int32."""
    return np.asarray(ids, dtype=_DTYPE).tobytes()


def tokens_from_bytes(data: bytes) -> npt.NDArray[np.int32]:
    """View packed token ids as an int32 array (n,), read-only, without a copy."""
    return np.frombuffer(data, dtype=_DTYPE)


def num_tokens(data: bytes) -> int:
    """How many tokens are packed in `data`."""
    return len(data) // TOKEN_BYTES
