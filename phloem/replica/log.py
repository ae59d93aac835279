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

from phloem.replica.commands import INSERT, Command

__all__ = ["CommandLog", "ReplicatedState"]

_FOLD_EVERY = 256


class ReplicatedState(Protocol):
    """State that changes by commands alone; equal commands give equal states."""

    def apply(self, command: Command) -> Any:
        """Carry out one command; what it returns only the leader reads."""
        ...

    def digest(self) -> str:
        """A fingerprint of all of it, the number of commands applied included."""
        ...

    def free_by_pool(self) -> dict[str, int]:
        """Free pages of every pool, by its name."""
        ...


class CommandLog:
    """Applies each command to the leader's state, then hands it to every follower."""

    __slots__ = ("_apply", "_followers", "_num_folded", "_pending", "_rolling")

    def __init__(self, state: ReplicatedState) -> None:
        self._apply = state.apply
        self._followers: list[ReplicatedState] = []
        self._pending: list[Command] = []
        self._num_folded = 0
        self._rolling = b""

    @property
    def position(self) -> int:
        """How many commands were written."""
        return self._num_folded + len(self._pending)

    def attach(self, follower: ReplicatedState) -> None:
        """Send every command from now on to `follower`, whose state must equal the leader's."""
        self._followers.append(follower)

    def append(self, command: Command) -> Any:
        """Write one command. Returns what applying it here returned."""
        pending = self._pending
        pending.append(command)
        result = self._apply(command)
        if self._followers:
            for follower in self._followers:
                follower.apply(command)
        if command[0] == INSERT or len(pending) == _FOLD_EVERY:
            self._fold()
        return result

    def digest(self) -> str:
        """A fingerprint of every command so far, and their order."""
        return f"{self.position}:{self._folded().hex()}"

    def _fold(self) -> None:
        # When is a function of the commands alone, so every rank's digest is made of the same
        # pieces; at every insert, because an insert keeps a prompt's tokens alive.
        self._rolling = self._folded()
        self._num_folded += len(self._pending)
        self._pending.clear()

    def _folded(self) -> bytes:
        # Version 2 of marshal writes values alone: no object identities, no interning flags.
        return xxhash.xxh3_128_digest(self._rolling + marshal.dumps(self._pending, 2))
