"""The ordered log of commands, and what applies them.

    leader                                     followers
    decide -> append(command) -> state.apply   state.apply
                    |                               ^
                    `------- the same command ------'

With one rank the log is a function call. A follower sees every command, in order, from an equal
start; `CommandLog.digest` and `ReplicatedState.digest` are what ranks compare.
"""

from __future__ import annotations

import marshal
from typing import Any, Protocol

import xxhash

from phloem.replica.commands import (
    Alloc,
    Append,
    Command,
    Detach,
    Evict,
    Free,
    Insert,
    Lock,
    Merge,
    Split,
    Unlock,
)

__all__ = ["CommandLog", "ReplicatedState"]

_FOLD_EVERY = 256
_OPCODES: dict[type[Command], int] = {
    kind: code
    for code, kind in enumerate(
        (Alloc, Free, Insert, Append, Split, Merge, Lock, Unlock, Evict, Detach)
    )
}


class ReplicatedState(Protocol):
    """State that changes by commands alone; equal commands give equal states."""

    def apply(self, command: Command) -> Any:
        """Carry out one command; what it returns only the leader reads."""
        ...

    def digest(self) -> str:
        """A fingerprint of all of it, the number of commands applied included."""
        ...


class CommandLog:
    """Applies each command to the leader's state, then hands it to every follower."""

    __slots__ = ("_apply", "_followers", "_pending", "_rolling", "position")

    def __init__(self, state: ReplicatedState) -> None:
        self.position = 0
        self._apply = state.apply
        self._followers: list[ReplicatedState] = []
        self._pending: list[Command] = []
        self._rolling = b""

    def attach(self, follower: ReplicatedState) -> None:
        """Send every command from now on to `follower`, whose state must equal the leader's."""
        self._followers.append(follower)

    def append(self, command: Command) -> Any:
        """Write one command. Returns what applying it here returned."""
        self.position += 1
        pending = self._pending
        pending.append(command)
        if len(pending) >= _FOLD_EVERY:
            self._fold()
        result = self._apply(command)
        for follower in self._followers:
            follower.apply(command)
        return result

    def digest(self) -> str:
        """A fingerprint of every command so far, and their order."""
        self._fold()
        return f"{self.position}:{self._rolling.hex()}"

    def _fold(self) -> None:
        # Version 2 of marshal writes values alone: no object identities, no interning flags.
        # One blob per command, so that the digest does not depend on when it was folded.
        for command in self._pending:
            blob = marshal.dumps((_OPCODES[type(command)], *command), 2)
            self._rolling = xxhash.xxh3_128_digest(self._rolling + blob)
        self._pending.clear()
