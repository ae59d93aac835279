"""A server process for the signal tests: prints its port, then its exit facts as JSON lines.

A prompt "slow N" answers N tokens, 20 ms apart; "stuck" ends only when the drain's time is over;
"die" is the end of the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from phloem.core.errors import ConfigError, EngineDead
from phloem.core.request import FinishReason
from phloem.engine.api import TextChunk, TextRequest
from phloem.server import create_app, serve
from tests.server.fake_engine import FakeEngine, ids_of


class SlowEngine(FakeEngine):
    """Answers take real time here: that is what draining waits for."""

    async def _play(self, request: TextRequest, prompt: int) -> AsyncIterator[TextChunk]:
        text = bytes(ids_of(request)).decode()
        if text == "stuck":
            yield TextChunk(text="stuck", tokens=(1,), prompt_tokens=prompt, completion_tokens=1)
            await self.cut.wait()
            yield TextChunk(finish=FinishReason.ABORT)
            return
        if text == "die":
            self.alive, self.ended = False, True
            raise EngineDead("killed by the test")
        async for chunk in super()._play(request, prompt):
            yield chunk
            await asyncio.sleep(0.02)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> int:
    engine = SlowEngine()
    try:
        code = serve(
            create_app(engine),
            engine,
            port=int(sys.argv[1]),
            on_ready=lambda port: say(port=port),
            drain_timeout_s=float(sys.argv[2]),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    say(finished=len(engine.finished), aborted=len(engine.aborted), closed=engine.closed)
    return code


if __name__ == "__main__":
    sys.exit(main())
