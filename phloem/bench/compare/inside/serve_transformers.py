"""Runs inside the transformers environment: the library behind /v1/completions.

One thread computes. Waiting prompts of equal length without a cached prefix make one batch; all
others run alone. The caches of finished answers are kept, within a budget of tokens, and the one
that shares the longest prefix with a new prompt is continued.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import queue
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_GATHER_S = 0.02  # how long a first request waits for others to share its batch


@dataclass(slots=True)
class Job:
    """One request; `events` receives token ids, then None."""

    prompt: list[int]
    max_tokens: int
    events: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    cached: int = 0


@dataclass(slots=True)
class Kept:
    """The cache of an answered prompt, and the ids that it covers."""

    ids: list[int]
    cache: Any


class Engine:
    """Owns model and caches; `run` is the body of the only thread that computes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self.torch.set_num_threads(args.threads)
        dtype = {"bf16": self.torch.bfloat16, "fp32": self.torch.float32}[args.dtype]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        self._new_cache = transformers.DynamicCache
        self._budget, self._max_batch = args.pool_tokens, args.max_batch
        self._kept: list[Kept] = []  # the last used one at the end
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: list[Job] = []

    def run(self) -> None:
        """Answer jobs for ever."""
        with self.torch.inference_mode():
            while True:
                self._gather()
                self._answer(self._next_batch())

    def _gather(self) -> None:
        if not self._waiting:
            self._waiting.append(self.jobs.get())
        try:
            while True:
                self._waiting.append(self.jobs.get(timeout=_GATHER_S))
        except queue.Empty:
            pass

    def _next_batch(self) -> list[Job]:
        """The oldest job, and all that can share its forward passes."""
        first = self._waiting.pop(0)
        batch = [first]
        if self._best(first.prompt)[1] == 0:
            for job in list(self._waiting):
                alike = len(job.prompt) == len(first.prompt) and job.max_tokens == first.max_tokens
                if alike and len(batch) < self._max_batch and self._best(job.prompt)[1] == 0:
                    self._waiting.remove(job)
                    batch.append(job)
        return batch

    def _best(self, prompt: list[int]) -> tuple[Kept | None, int]:
        """The kept cache with the longest common prefix; the last token is always computed."""
        best, longest = None, 0
        for kept in self._kept:
            length = _common(kept.ids, prompt[:-1])
            if length > longest:
                best, longest = kept, length
        return best, longest

    def _answer(self, batch: list[Job]) -> None:
        cache, start = self._take_cache(batch[0].prompt) if len(batch) == 1 else (None, 0)
        batch[0].cached = start
        cache = self._new_cache() if cache is None else cache
        ids = self.torch.tensor([job.prompt[start:] for job in batch])
        made: list[list[int]] = [[] for _ in batch]
        for step in range(batch[0].max_tokens):
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            for job, row, token in zip(batch, made, ids[:, 0].tolist(), strict=True):
                row.append(token)
                job.events.put(token)
            if step == batch[0].max_tokens - 1:
                break
        for job in batch:
            job.events.put(None)
        if len(batch) == 1:
            self._keep(Kept(batch[0].prompt + made[0][:-1], cache))

    def _take_cache(self, prompt: list[int]) -> tuple[Any, int]:
        """A cache cut to the common prefix: the kept one if most of it is used, else a copy."""
        kept, length = self._best(prompt)
        if kept is None:
            return None, 0
        if 2 * length >= len(kept.ids):
            self._kept.remove(kept)
            cache = kept.cache
        else:
            self._kept.remove(kept)
            self._kept.append(kept)
            cache = copy.deepcopy(kept.cache)
        if surplus := cache.get_seq_length() - length:
            cache.crop(-surplus)
        return cache, length

    def _keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        while len(self._kept) > 1 and sum(len(k.ids) for k in self._kept) > self._budget:
            self._kept.pop(0)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low


def make_handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """The HTTP side: /v1/models and a streaming /v1/completions for prompts of token ids."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send_json({"object": "list", "data": [{"id": "model", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            job = Job(prompt=body["prompt"], max_tokens=body["max_tokens"])
            engine.jobs.put(job)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            count = 0
            while (token := job.events.get()) is not None:
                count += 1
                text = engine.tokenizer.decode([token])
                self._event({"choices": [{"index": 0, "text": text}]})
            usage = {
                "prompt_tokens": len(job.prompt),
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": job.cached},
            }
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def _event(self, data: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        def _send_json(self, data: dict[str, Any]) -> None:
            raw = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # the default of 5 resets connections of a batch of 32


def main() -> None:
    """Load, then serve until SIGTERM ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--pool-tokens", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    engine = Engine(args)
    threading.Thread(target=engine.run, daemon=True).start()
    _Server(("127.0.0.1", args.port), make_handler(engine)).serve_forever()


if __name__ == "__main__":
    main()
