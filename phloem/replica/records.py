"""The log between processes: the leader packs what was written since the last record, a follower
applies it.

    leader     CommandLog --> RecordWriter.take() --> bytes, and now and then a digest
    follower   RecordReader.apply(bytes), and its own digest to compare

A record is applied whole and in order, so equal digests after one mean equal states.
"""

from __future__ import annotations

import marshal
from typing import Any

from phloem.replica.commands import Command
from phloem.replica.log import CommandLog, ReplicatedState

__all__ = ["RecordReader", "RecordWriter"]

# Values alone: no object identities, no interning flags. See `CommandLog`.
_MARSHAL = 2


class RecordWriter:
    """The leader's side. Its state must equal the followers' when it is made."""

    def __init__(self, log: CommandLog, state: ReplicatedState, *, digest_every: int) -> None:
        """`digest_every`: records from one with a digest to the next."""
        self._state = state
        self._digest_every = digest_every
        self._commands: list[Command] = []
        self._num_records = 0
        log.attach(self)

    def apply(self, command: Command) -> Any:
        """As a follower of the log: keep it for the next record."""
        self._commands.append(command)

    def digest(self) -> str:
        return self._state.digest()

    def free_by_pool(self) -> dict[str, int]:
        return self._state.free_by_pool()

    def take(self) -> tuple[bytes, str | None]:
        """The commands since the last call; the digest after them where it is to be compared."""
        self._num_records += 1
        record = marshal.dumps(self._commands, _MARSHAL) if self._commands else b""
        self._commands.clear()
        compare = self._num_records % self._digest_every == 0
        return record, self._state.digest() if compare else None


class RecordReader:
    """A follower's side, over its own copy of the state."""

    def __init__(self, state: ReplicatedState) -> None:
        self._state = state

    def apply(self, log: bytes) -> None:
        """Carry out the commands of one record, in order."""
        if log:
            apply = self._state.apply
            for command in marshal.loads(log):
                apply(command)

    def digest(self) -> str:
        """See `ReplicatedState.digest`."""
        return self._state.digest()

    def free_by_pool(self) -> dict[str, int]:
        """See `ReplicatedState.free_by_pool`."""
        return self._state.free_by_pool()
