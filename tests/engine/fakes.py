"""The smallest model folder, and a core of real scheduler, tree and loop over a fake worker.

The fake model says printable ASCII, a function of all tokens before. Prompts that begin with a
special id make it misbehave, or say what the test dictates (`script`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phloem.config import CacheOptions, Config, ModelOptions, SchedulerOptions
from phloem.core.errors import ConfigError
from phloem.core.tokens import tokens_from_bytes
from phloem.engine.api import ModelCard
from phloem.engine.core import BuildHooks
from phloem.engine.facts import EngineFacts
from phloem.engine.loop_core import LoopCore, make_loop_core
from phloem.engine.tokenizer import ModelTokenizer
from phloem.sim import FakeWorker, NextToken, hash_model

VOCAB = 300
PAD, EOS, TOOL = 256, 257, 258
HANG, CRASH, RAISE, SCRIPT = 290, 291, 292, 293

BUILDER = "tests.engine.fakes:build_fake"
BROKEN_BUILDER = "tests.engine.fakes:build_broken"

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _byte_chars() -> list[str]:
    """GPT-2's alphabet, written independently of the code under test."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b if b in keep else next(moved)) for b in range(256)]


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens (id = byte), then <pad> 256, <eos> 257, <tool> 258 (added, not special)."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>"), AddedToken("<eos>")])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def model_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_tokenizer(), eos_ids=(EOS,))


def write_model(folder: Path) -> Path:
    """A folder that resolves as a model and has a byte-level tokenizer; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": None, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def fake_config(
    folder: Path, *, num_pages: int = 2048, page_size: int = 4, **scheduler: int | bool | str
) -> Config:
    return Config(
        model=ModelOptions(model=str(folder)),
        cache=CacheOptions(num_pages=num_pages, page_size=page_size),
        scheduler=SchedulerOptions(**scheduler),
    )


def fake_card(*, num_pages: int = 2048, page_size: int = 4, max_model_len: int = 512) -> ModelCard:
    return ModelCard(
        name="fake",
        path="fake",
        architecture="fake",
        dtype="fp32",
        device="cpu",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        page_bytes=1024,
        created_s=0,
    )


def script(ids: Sequence[int]) -> list[int]:
    """A prompt after which the fake model says exactly `ids`, then EOS for ever."""
    return [SCRIPT, *divmod(len(ids), 256), *ids]


_HASH = hash_model(90)


def say(context: bytes, attempt: int) -> int:
    """The fake model when it behaves."""
    ids = tokens_from_bytes(context)
    if ids[0] == SCRIPT:
        count = 256 * int(ids[1]) + int(ids[2])
        said = len(ids) - 3 - count
        return int(ids[3 + said]) if said < count else EOS
    return 33 + _HASH(context, attempt)


def _misbehave(first: int) -> None:
    match first:
        case 290:  # HANG
            threading.Event().wait()
        case 291:  # CRASH
            os.kill(os.getpid(), signal.SIGKILL)
        case 292:  # RAISE
            raise RuntimeError("the fake worker broke")


def _model(hooks: BuildHooks) -> NextToken:
    def next_token(context: bytes, attempt: int) -> int:
        hooks.on_layer()
        _misbehave(int(tokens_from_bytes(context[:4])[0]))
        return say(context, attempt)

    return next_token


def build_fake(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    """A `CoreBuilder`."""
    for done in range(5):
        hooks.on_load(done + 1, 5, "weights")
    card = fake_card(num_pages=config.cache.num_pages or 1, page_size=config.page_size)
    worker = FakeWorker(
        _model(hooks),
        num_pages=card.num_pages,
        page_size=card.page_size,
        max_running=config.scheduler.max_running,
        max_model_len=card.max_model_len,
    )
    facts = EngineFacts(
        card=card,
        weight_bytes=0,
        activation_bytes=0,
        threads=1,
        load_s=0.0,
        prefix_cache=config.cache.prefix_cache,
        schedule_policy=config.scheduler.schedule_policy,
    )
    return make_loop_core(config, hooks, worker=worker, facts=facts, eos_ids=eos_ids)


def build_broken(config: Config, hooks: BuildHooks, eos_ids: tuple[int, ...]) -> LoopCore:
    raise ConfigError("the checkpoint is broken: no tensor model.norm.weight")
