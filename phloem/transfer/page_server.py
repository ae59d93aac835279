"""A rank's end of the transfers where it shares no memory with the leader.

    link --> thread: reads and writes pages of this rank's own pools, as the leader says
                |-- LoadNews: wakes the step that waits for a layer

The leader asks for a page when the step that computed it has ended on all ranks, and sends one when
the last step that may still read what lay there has: so no order has to be kept here.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence

import numpy as np

from phloem.core.errors import GroupError
from phloem.pools import DevicePool
from phloem.transfer.component import layers_needed
from phloem.transfer.layer_wait import wait_for_layer
from phloem.transfer.page_link import Get, LiveLoad, LoadNews, Message, PageLink, Put
from phloem.transfer.pool_bytes import PoolBytes

__all__ = ["PageServer"]

logger = logging.getLogger(__name__)


class PageServer:
    """Implements `LayerGate` for this rank's steps. Ends with the link, which others close.

    `layers[c]`: the model's numbers of the layers of component c.
    """

    def __init__(
        self, link: PageLink, pools: Sequence[DevicePool], layers: Sequence[Sequence[int]]
    ) -> None:
        self._link = link
        self._bytes_of = functools.cache(lambda component: PoolBytes(pools[component]))
        self._layers = [tuple(numbers) for numbers in layers]
        self._changed = threading.Condition()
        # All below: under _changed.
        self._newest = -1  # load that the leader has told of
        self._live: dict[int, LiveLoad] = {}
        self._over = False
        threading.Thread(target=self._serve, name="phloem-pages", daemon=True).start()

    def wait_layer(self, transfer_ids: tuple[int, ...], layer: int) -> None:
        """See `LayerGate`. Of a load that nobody has told of yet, too; none is waited for after the
        link's end: what the step then computes is of no use to anybody."""
        wait_for_layer(self._changed, self._has_layer, transfer_ids, layer)

    def step_finished(self, step: int) -> None:
        """The leader learns of it by the step's result, from all ranks."""

    def _has_layer(self, transfer_id: int, layer: int) -> bool:
        """Under _changed."""
        if self._over:
            return True
        load = self._live.get(transfer_id)
        if load is None:
            return transfer_id <= self._newest  # over; if it is newer, it is still to come
        return load.num_layers >= layers_needed(self._layers[load.component], layer)

    def _serve(self) -> None:
        try:
            while True:
                self._take(self._link.receive())
        except GroupError as error:
            logger.debug("%s", error)  # the leader ends
        except Exception:  # the thread's entry point
            logger.exception("this rank's pages cannot be read or written")
            self._link.lost()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._link.close()

    def _take(self, message: Message) -> None:
        match message:
            case Get():
                slots = np.frombuffer(message.slots, dtype=np.int64)
                self._link.send_bytes(self._bytes_of(message.component).read(slots))
            case Put():
                slots = np.frombuffer(message.slots, dtype=np.int64)
                pool = self._bytes_of(message.component)
                data = pool.room(len(slots), message.end_layer - message.first_layer)
                self._link.receive_bytes(data)
                pool.write(slots, message.first_layer, data)
                self._link.send_ack()
            case LoadNews():
                with self._changed:
                    self._newest = message.newest
                    self._live = {load.id: load for load in message.live}
                    self._changed.notify_all()
