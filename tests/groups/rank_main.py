"""One rank in a process of its own: plays a script, then rank 1 is killed and the rest see it."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from phloem.core.errors import GroupError
from phloem.groups import GroupSeat, ShmGroup
from tests.contract.test_groups import Script

if __name__ == "__main__":
    torch.set_num_threads(1)
    fields = json.loads(sys.argv[1])
    seat = GroupSeat(**(fields | {"bells": tuple(fields["bells"])}))
    group = ShmGroup(seat)
    script = Script(11, seat.size, 100)
    script.play(group, lead=0)
    script.play(group, lead=3)
    print(group.operations.digest, flush=True)
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except GroupError as error:
        print(error.ranks, error)
