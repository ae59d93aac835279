"""One exchange on its way through the ring, chunk by chunk."""

from __future__ import annotations

from phloem.groups.base import Exchange
from phloem.groups.shm_ring import Ring

__all__ = ["Job"]


class Job:
    """How far an exchange is. Not thread-safe."""

    def __init__(self, exchange: Exchange, ring: Ring) -> None:
        self.exchange = exchange
        self._ring = ring
        sends, recvs = exchange.sends, exchange.recvs
        self._sent = [0] * len(sends)
        self._got = [0] * len(recvs)
        self._open = [source for source, tensor in enumerate(recvs) if tensor is not None]
        self._targets = [d for d, tensor in enumerate(sends) if tensor is not None]
        self._sizes = [0 if t is None else t.nbytes for t in sends]
        self.is_written = not self._targets
        largest = max((t.nbytes for t in recvs if t is not None), default=0)
        # Then a writer may need us to read on. What it sends to others in the same slot is unknown.
        alone = exchange.same or len(recvs) == 2
        self.is_long = largest > ring.chunk_bytes or not alone

    @property
    def is_read(self) -> bool:
        return not self._open

    @property
    def is_done(self) -> bool:
        return self.is_written and not self._open

    def open_sources(self) -> list[int]:
        """Ranks that have not sent all of it."""
        return self._open

    def write_chunk(self) -> bool:
        """Fill and publish the next slot, which is free. False if this rank sends nothing."""
        if self.is_written:
            return False
        parts = self._put_shared() if self.exchange.same else self._put_parts()
        last = self._sent == self._sizes
        self._ring.publish(self.exchange.serial, self.exchange.digest, parts, last=last)
        self.is_written = last
        return True

    def _put_shared(self) -> list[tuple[int, int]]:
        """One copy that all receivers read."""
        tensor = self.exchange.sends[self._targets[0]]
        assert tensor is not None
        at = self._sent[self._targets[0]]
        count = min(self._ring.chunk_bytes, tensor.nbytes - at)
        if count:
            self._ring.put(0, tensor.data_ptr() + at, count)
        for target in self._targets:
            self._sent[target] += count
        return [(0, count)] * len(self._sizes)

    def _put_parts(self) -> list[tuple[int, int]]:
        """An equal share of the slot for each receiver that still wants some."""
        parts = [(0, 0)] * len(self._sizes)
        left = [d for d in self._targets if self._sent[d] < self._sizes[d]]
        offset = 0
        for place, target in enumerate(left):
            share = (self._ring.chunk_bytes - offset) // (len(left) - place) // 64 * 64
            count = min(share, self._sizes[target] - self._sent[target])
            tensor = self.exchange.sends[target]
            assert tensor is not None
            self._ring.put(offset, tensor.data_ptr() + self._sent[target], count)
            self._sent[target] += count
            parts[target] = (offset, count)
            offset += -(-count // 64) * 64
        return parts

    def read_chunk(self, source: int) -> bool:
        """Take the next chunk of `source`. False if it is not of this operation, or of its size."""
        header = self._ring.head(source)
        tensor = self.exchange.recvs[source]
        assert tensor is not None
        after = self._got[source] + header.num_bytes
        fits = after == tensor.nbytes if header.last else after <= tensor.nbytes
        same = header.serial == self.exchange.serial and header.digest == self.exchange.digest
        if not (same and fits):
            return False
        if header.num_bytes:
            self._ring.get(source, header, tensor.data_ptr() + self._got[source])
        self._got[source] = after
        self._ring.take(source)
        if header.last:
            self._open = [other for other in self._open if other != source]
        return True
