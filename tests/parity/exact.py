"""An engine whose numbers do not depend on what is computed together: equality to the last bit.

Matrix products of different shapes round differently, so a page that comes of another chunking
differs in its last bits; packed, a code now and then. Here every row of a product is a sum of its
own, and attention goes token by token (`--kernels reference`): any way through the cache must give
the bytes that the cold pass gives, whatever the pages' dtype.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.cache import check_invariants
from phloem.kernels.reference import ReferenceOps
from tests.parity.rig import (
    Cold,
    Rig,
    leaves,
    longest_first,
    raw_copies,
    settle,
    tokens_of,
)

__all__ = ["check_exact", "sum_row_by_row"]


def sum_row_by_row(patch: pytest.MonkeyPatch) -> None:
    """From now on reference products do not depend on the rows beside them."""

    def linear(
        self: ReferenceOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = (x.float()[:, None, :] * weight.float()).sum(dim=-1)
        return (out if bias is None else out + bias.float()).to(x.dtype)

    patch.setattr(ReferenceOps, "linear", linear)


def check_exact(rig: Rig, cold: Cold) -> int:
    """Tokens, logits and the bytes of every copy of every page are cold's; how many copies."""
    rig.loop.run_until_idle()
    for name, answer in longest_first(rig):
        assert answer.error is None, answer.error
        assert answer.tokens
        assert cold.chooses(answer.prompt, answer.tokens), f"{name} differs from cold"
    for serial, by_position in rig.logits.items():
        check_logits(rig, cold, serial, by_position)
    settle(rig)
    check_invariants(rig.cache, idle=True)
    return check_bytes(rig, cold)


def check_logits(rig: Rig, cold: Cold, serial: int, by_position: dict[int, torch.Tensor]) -> None:
    init = rig.recorder.inits[serial]
    prompt = tokens_of(init)[: init.num_prompt_tokens]
    same = [a.prompt + a.tokens for a in rig.answers.values() if a.prompt == prompt]
    sequence = max(same, key=len)
    expected = cold.logits(tuple(sequence))
    first = rig.recorder.first_right.get(serial, 0)
    for position, logits in by_position.items():
        if first <= position < len(sequence):
            assert torch.equal(logits, expected[position]), f"serial {serial} at {position}"


def check_bytes(rig: Rig, cold: Cold) -> int:
    num_compared = 0
    for leaf, packed, places in leaves(rig):
        tokens = np.frombuffer(packed, dtype="<i4").tolist()
        for component, pages in enumerate(cold.raw_pages(tokens, rig.page_size)):
            for page, ((node, number), expected) in enumerate(zip(places, pages, strict=True)):
                copies = raw_copies(rig, node, number, component)
                assert copies or component, f"page {page} of {leaf} is nowhere"
                for place, held in copies.items():
                    assert held == expected, f"page {page} of {leaf}, {component}, in {place}"
                    num_compared += 1
    return num_compared
