"""Messages and heartbeat: the two things that cross the process border."""

from __future__ import annotations

import os

import pytest

from phloem.config import Config
from phloem.core.errors import BadRequest
from phloem.core.request import (
    CachedTokens,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    SamplingParams,
    TokenLogprob,
)
from phloem.engine import messages as msg
from phloem.engine.heartbeat import Heartbeat, LoopState

REQUEST = GenerateRequest(
    request_id="0:r",
    tokens=bytes(range(64)),
    sampling=SamplingParams(
        max_tokens=5, stop=("\n",), logit_bias=((3, -1.5),), seed=2**63, logprobs=2
    ),
    namespace=b"\x00\xff",
    arrival_s=1.25,
)
CHUNK = OutputChunk(
    request_id="0:r",
    tokens=(1, 2),
    logprobs=(TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))), TokenLogprob(2, -0.1)),
    finish=FinishReason.STOP,
    stop_token=2,
    prompt_tokens=16,
    cached=CachedTokens(device=12),
)


@pytest.mark.parametrize(
    "message",
    [
        msg.Start("m:f", Config(), (1, 2)),
        msg.Add(REQUEST),
        msg.Abort("0:r"),
        msg.Stats(3),
        msg.Flush(4),
        msg.Shutdown(),
    ],
)
def test_messages_to_the_engine_survive_the_wire(message: msg.ToEngine) -> None:
    assert msg.decode_to_engine(msg.frame(message)[4:]) == message


@pytest.mark.parametrize(
    "message",
    [
        msg.Loading(1, 2, "weights"),
        msg.Failed("why", True),
        msg.Outputs([CHUNK, CHUNK]),
        msg.Refused("0:r", 400, "no", None, "c"),
        msg.Flushed(1, 2),
    ],
)
def test_messages_to_the_front_survive_the_wire(message: msg.ToFront) -> None:
    assert msg.decode_to_front(msg.frame(message)[4:]) == message


def test_values_are_checked_again_on_the_other_side() -> None:
    """A frame with a setting out of range is no request."""
    data = msg.frame(msg.Add(REQUEST))[4:]
    broken = data.replace(b"\xaamax_tokens\x05", b"\xaamax_tokens\x00")
    assert broken != data
    with pytest.raises((BadRequest, ValueError)):
        msg.decode_to_engine(broken)


def test_heartbeat_is_seen_through_another_mapping() -> None:
    writer = Heartbeat.create()
    reader = Heartbeat(os.dup(writer.fd))
    before = reader.read()
    assert before.state is LoopState.LOADING
    writer.beat(LoopState.BUSY)
    writer.beat_layer()
    after = reader.read()
    assert (after.state, after.progress) == (LoopState.BUSY, before.progress + 2)
    assert after.last_s >= before.last_s
    reader.close()
    writer.close()
    writer.close()
