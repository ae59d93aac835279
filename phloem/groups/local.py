"""A group of threads in one process: for tests and for ranks that share an interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from phloem.groups.base import DEFAULT_TIMEOUT_S, BaseGroup, Exchange, as_bytes

__all__ = ["LocalGroup", "local_groups"]


@dataclass(frozen=True, slots=True)
class _Letter:
    digest: int
    payload: Tensor  # a copy: the sender may write its own again at once


class _Hub:
    """What the ranks share, all of it under `changed`."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], _Letter] = {}  # (serial, from, to)
        self.gone: set[int] = set()
        self.begun: list[dict[int, int]] = [{} for _ in range(size)]  # rank -> serial -> digest

    def await_letter(self, key: tuple[int, int, int], timeout_s: float) -> _Letter | None:
        """Take a letter, waiting for it unless its sender has gone. Under `changed`."""
        self.changed.wait_for(lambda: key in self.mail or key[1] in self.gone, timeout_s)
        return self.mail.pop(key, None)


_REMEMBERED = 64  # operations whose digests the hub keeps per rank


class LocalGroup(BaseGroup):
    """One rank's end. Made by `local_groups`."""

    def __init__(
        self, hub: _Hub, *, rank: int, axis: str, timeout_s: float, members: Sequence[int]
    ) -> None:
        super().__init__(
            rank=rank, size=len(members), axis=axis, timeout_s=timeout_s, members=members
        )
        self._hub = hub

    def _launch(self, exchange: Exchange) -> None:
        letters = {
            (exchange.serial, self.rank, peer): _Letter(exchange.digest, as_bytes(tensor).clone())
            for peer, tensor in enumerate(exchange.sends)
            if tensor is not None
        }
        hub = self._hub
        with hub.changed:
            hub.mail |= letters
            begun = hub.begun[self.rank]
            begun[exchange.serial] = exchange.digest
            begun.pop(exchange.serial - _REMEMBERED, None)
            hub.changed.notify_all()

    def _complete(self, exchange: Exchange, deadline_s: float) -> None:
        hub = self._hub
        for source, tensor in enumerate(exchange.recvs):
            if tensor is None:
                continue
            key = (exchange.serial, source, self.rank)
            with hub.changed:
                left_s = max(0.0, deadline_s - time.monotonic())
                letter = hub.await_letter(key, left_s)
                if letter is None:
                    raise self.late(exchange, (source,), gone=source in hub.gone)
                if letter.digest != exchange.digest or letter.payload.nbytes != tensor.nbytes:
                    raise self.mismatch(source, exchange.serial)
            as_bytes(tensor).copy_(letter.payload)

    def _digest_of(self, rank: int, serial: int) -> int | None:
        return self._hub.begun[rank].get(serial)

    def close(self) -> None:
        with self._hub.changed:
            self._hub.gone.add(self.rank)
            self._hub.changed.notify_all()


def local_groups(
    size: int,
    *,
    axis: str = "cp",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    members: Sequence[int] | None = None,
) -> list[LocalGroup]:
    """One end per rank, each for a thread of its own. `members`: as `BaseGroup` takes them."""
    hub = _Hub(size)
    names = range(size) if members is None else members
    return [
        LocalGroup(hub, rank=rank, axis=axis, timeout_s=timeout_s, members=names)
        for rank in range(size)
    ]
