"""A core without pages or tensors, the smallest model on disk, and how to talk to both."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phloem.config import Config, ModelOptions, SchedulerOptions
from phloem.core.request import FinishReason, GenerateRequest, OutputChunk
from phloem.core.stats import CacheStats, EngineStats
from phloem.core.tokens import tokens_from_bytes, tokens_to_bytes
from phloem.engine.api import ModelCard
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts

VOCAB = 300
EOS = 257
POOL_PAGES = 4096
PAGE = 16

BUILDER = "tests.engine.fakes:build_fake"

# Prompts whose first token is one of these make the fake misbehave.
HANG, CRASH, RAISE, FAIL_ONE = 290, 291, 292, 293


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens (id = byte), then <pad> 256, <eos> 257, <tool> 258 (added, not special)."""
    alphabet = [chr(c) for c in _byte_chars()]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>"), AddedToken("<eos>")])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def _byte_chars() -> list[int]:
    """GPT-2's alphabet, written independently of the code under test."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [b if b in keep else next(moved) for b in range(256)]


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_model(folder: Path) -> Path:
    """A folder that resolves as a model and has a byte-level tokenizer; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": None, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def fake_config(folder: Path, **scheduler: int) -> Config:
    return Config(model=ModelOptions(model=str(folder)), scheduler=SchedulerOptions(**scheduler))


def fake_card(model: str, *, max_model_len: int = 4096) -> ModelCard:
    return ModelCard(
        name="fake",
        path=model,
        architecture="fake",
        dtype="fp32",
        device="cpu",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        page_size=PAGE,
        num_pages=POOL_PAGES,
        page_bytes=1024,
        created_s=0,
    )


def next_token(tokens: list[int]) -> int:
    """What the fake model says after `tokens`: printable ASCII."""
    digest = hashlib.blake2b(tokens_to_bytes(tokens), digest_size=4).digest()
    return 33 + int.from_bytes(digest, "little") % 90


def cold(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeCore:
    """One token per running request and step; pages are only counted."""

    def __init__(self, config: Config, hooks: BuildHooks) -> None:
        self._hooks = hooks
        self._running: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self._steps = 0
        self.facts = EngineFacts(
            card=fake_card(config.model.model),
            weight_bytes=0,
            activation_bytes=0,
            threads=1,
            load_s=0.0,
            prefix_cache=True,
            schedule_policy="fcfs",
        )

    def add(self, request: GenerateRequest) -> None:
        tokens = [int(t) for t in tokens_from_bytes(request.tokens)]
        match tokens[0]:
            case 290:  # HANG
                threading.Event().wait()
            case 291:  # CRASH
                os.kill(os.getpid(), signal.SIGKILL)
            case 292:  # RAISE
                raise RuntimeError("the fake worker broke")
        self._running[request.request_id] = (request, tokens)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def step(self) -> bool:
        self._steps += 1
        chunks = [self._advance(*entry) for entry in self._running.values()]
        for chunk in chunks:
            if chunk.finish is not None:
                del self._running[chunk.request_id]
        if chunks:
            self._hooks.on_layer()
            self._hooks.emit(chunks)
        return bool(self._running)

    def _advance(self, request: GenerateRequest, tokens: list[int]) -> OutputChunk:
        prompt = len(request.tokens) // 4
        name = request.request_id
        if tokens[0] == FAIL_ONE:
            return OutputChunk(request_id=name, finish=FinishReason.ERROR, error="NaN logits")
        tokens.append(next_token(tokens))
        done = len(tokens) - prompt >= request.sampling.max_tokens
        return OutputChunk(
            request_id=name,
            tokens=(tokens[-1],),
            finish=FinishReason.LENGTH if done else None,
            prompt_tokens=prompt,
        )

    def flush(self) -> int:
        return self._locked()

    def _locked(self) -> int:
        return sum(-(-len(tokens) // PAGE) for _, tokens in self._running.values())

    def stats(self) -> EngineStats:
        locked = self._locked()
        cache = CacheStats(
            page_size=PAGE,
            total_pages=POOL_PAGES,
            free_pages=POOL_PAGES - locked,
            evictable_pages=0,
            locked_pages=locked,
            nodes=0,
        )
        return EngineStats(
            running=len(self._running), queued=0, cache=cache, steps_total=self._steps
        )

    def close(self) -> None:
        pass


def build_fake(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> FakeCore:
    for done in range(5):
        hooks.on_load(done + 1, 5, "weights")
    return FakeCore(config, hooks)
