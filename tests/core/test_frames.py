"""Messages over a byte stream."""

from __future__ import annotations

import random

from phloem.core.frames import FrameReader, framed


def test_frames_arrive_whole_however_the_stream_is_cut() -> None:
    """Red if a body that came together with others waits for the next bytes, or is lost."""
    rng = random.Random(0)
    bodies = [bytes(rng.choices(range(256), k=rng.choice([0, 1, 5, 300]))) for _ in range(200)]
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    assert b"".join(map(framed, bodies)) == stream
    reader, one_by_one, found, taken = FrameReader(), FrameReader(), [], []
    while stream:
        size = rng.choice([1, 2, 3, 7, 500])
        found += reader.feed(stream[:size])
        one_by_one.add(stream[:size])
        if (body := one_by_one.take()) is not None:
            taken.append(body)
        stream = stream[size:]
    assert found == bodies
    assert taken + one_by_one.feed(b"") == bodies
