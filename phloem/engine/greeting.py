"""How a rank joins over a network: both ends prove that they know the secret of this start.

    leader                              rank
    MAGIC, 32 random bytes  ------>
                            <------     its number, 32 random bytes, proof of both randoms
    another proof           ------>     from now on `worker.wire`

The secret itself never travels here. Who does not prove it is told nothing, and its connection is
closed.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Iterator

__all__ = ["greet", "present"]

# Another version of what travels has another word.
_MAGIC = b"phloem-ranks-1\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_RANK = struct.Struct("<I")
# Who is no rank may say nothing at all; a rank answers at once.
_PATIENCE_S = 10.0


def greet(sock: socket.socket, secret: bytes, admit: Callable[[int], str | None]) -> int:
    """The leader's side: the rank at the other end. `admit` says why a rank is not taken, if so.

    Raises ConnectionError for whoever is refused.
    """
    with _patience(sock):
        nonce = os.urandom(_NONCE_BYTES)
        sock.sendall(_MAGIC + nonce)
        answer = _receive(sock, _RANK.size + _NONCE_BYTES + _PROOF_BYTES)
        head, theirs = answer[: _RANK.size], answer[_RANK.size : -_PROOF_BYTES]
        said = _proof(secret, b"rank", head, nonce, theirs)
        if not hmac.compare_digest(said, answer[-_PROOF_BYTES:]):
            raise ConnectionError("it does not know the secret of this start")
        (rank,) = _RANK.unpack(head)
        refusal = admit(rank)
        if refusal is not None:
            raise ConnectionError(refusal)
        sock.sendall(_proof(secret, b"leader", head, nonce, theirs))
    return int(rank)


def present(sock: socket.socket, secret: bytes, rank: int) -> None:
    """The rank's side. Raises ConnectionError if the leader refuses, or is not the one."""
    with _patience(sock):
        hello = _receive(sock, len(_MAGIC) + _NONCE_BYTES)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise ConnectionError("who answers is no leader of this version")
        head, nonce, mine = _RANK.pack(rank), hello[len(_MAGIC) :], os.urandom(_NONCE_BYTES)
        sock.sendall(head + mine + _proof(secret, b"rank", head, nonce, mine))
        proof = _receive(sock, _PROOF_BYTES)
        if not hmac.compare_digest(_proof(secret, b"leader", head, nonce, mine), proof):
            raise ConnectionError("who answers does not know the secret of this start")


@contextlib.contextmanager
def _patience(sock: socket.socket) -> Iterator[None]:
    sock.settimeout(_PATIENCE_S)
    try:
        yield
    except TimeoutError:
        raise ConnectionError(f"it says nothing for {_PATIENCE_S:g} s") from None
    finally:
        sock.settimeout(None)


def _proof(secret: bytes, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, who + b"|" + b"|".join(parts), "sha256")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("it has closed the connection")
        data += more
    return data
