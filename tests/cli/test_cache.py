"""`phloem cache`: a directory, a server, a file of prompts; errors are one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from phloem.cli.main import main
from phloem.cli.warm import WarmPrompt, read_prompts
from phloem.core.errors import ConfigError
from tests.stores.test_inspect import fill


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Five objects that no engine holds open."""
    fill(tmp_path / "kept", range(5)).close()
    return tmp_path / "kept"


def test_a_directory_is_counted_listed_and_verified(directory: Path, capsys) -> None:
    assert main(["cache", "stats", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["objects"], facts["object_bytes"]) == (5, 25_000)
    assert facts["used_bytes"] <= facts["capacity_bytes"]
    assert main(["cache", "ls", str(directory), "--limit", "2", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (len(listed["objects"]), listed["of"]) == (2, 5)
    assert main(["cache", "verify", str(directory)]) == 0
    assert "all as they were put" in capsys.readouterr().out


def test_damage_is_an_exit_code(directory: Path, capsys) -> None:
    assert main(["cache", "ls", str(directory), "--json"]) == 0
    segments = sorted(directory.glob("segment-*.kv"))
    data = bytearray(segments[0].read_bytes())
    first = data.index(_content(0)[:64])
    data[first + 70] ^= 1
    segments[0].write_bytes(data)
    capsys.readouterr()
    code = main(["cache", "verify", str(directory), "--json"])
    report = json.loads(capsys.readouterr().out)
    # Either it is found out, or (in a frame that may be torn) it was not even believed.
    assert report["objects"].get("ok") == 4
    assert code == (0 if report["ok"] else 1)


def _content(name: int) -> bytes:
    from tests.stores.rig import bytes_of
    from tests.stores.test_inspect import LENGTH

    return bytes_of(name, LENGTH)


def test_clear_empties_a_directory(directory: Path, capsys) -> None:
    assert main(["cache", "clear", str(directory)]) == 0
    assert list(directory.glob("segment-*.kv")) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cache", "stats", "/nowhere"], "no storage directory"),
        (["cache", "warm"], "name a file of prompts"),
        (["cache", "ls", "--limit", "0"], "--limit must be at least 1"),
        (["cache", "stats", "--url", "http://127.0.0.1:9"], "no answer from"),
        (["cache", "decisions", "/nowhere"], "asks a server"),
        (["cache", "remote", "/nowhere"], "asks a server"),
        (["cache", "warm", "/nowhere.jsonl"], "cannot read"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(argv, message, capsys) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_prompts_are_read_in_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    message = {"role": "user", "content": "hi"}
    lines = [{"prompt": "a"}, {"tokens": [1, 2]}, {"messages": [message]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(file) == [
        WarmPrompt(text="a"),
        WarmPrompt(tokens=(1, 2)),
        WarmPrompt(messages=(message,)),
    ]
    text = tmp_path / "p.txt"
    text.write_text("one\ntwo\n")
    assert read_prompts(text) == [WarmPrompt(text="one\ntwo\n")]


@pytest.mark.parametrize(
    "line",
    ["nope", "[]", "{}", '{"prompt": ""}', '{"tokens": ["a"]}', '{"prompt": "a", "tokens": [1]}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(file)


DECISION = {
    "request_id": "r7",
    "prompt_tokens": 4123,
    "pages": {"device": 3, "host": 120, "storage": 0, "new": 5},
    "choice": "part",
    "load_pages": 100,
    "reason": "because",
    "expected_s": {"chosen": 0.2, "load_all": 0.3, "compute_all": 7.9},
    "measured": True,
    "storage": {
        "found_pages": 1,
        "asked_pages": 2,
        "read_pages": 0,
        "waited_s": 0.5,
        "reason": "x",
    },
}


REMOTE = {
    "steps": [{"cached": "send_q", "own": "gather_kv", "steps": 12}],
    "rates": {"latency_s": 1e-5},
    "decisions": [
        {
            "step": 9,
            "requests": 1,
            "new_tokens": 64,
            "cached_tokens": 8192,
            "ways": [
                {"cached": "send_q", "own": "gather_kv", "layer_s": 4e-5},
                {"cached": "direct", "own": "direct", "layer_s": 9.5e-5},
            ],
        }
    ],
}


@pytest.fixture
def server(monkeypatch) -> list[httpx.Request]:
    """Answers like a server, and remembers what it was asked."""
    asked: list[httpx.Request] = []

    def request(method: str, url: str, **more) -> httpx.Response:
        sent = httpx.Request(method, url, headers=more.get("headers"), json=more.get("json"))
        asked.append(sent)
        if url.endswith("/cache/decisions"):
            assert more["params"] == {"limit": 20, "request_id": "r7"}
            return httpx.Response(200, json={"decisions": [DECISION]}, request=sent)
        if url.endswith("/cache/remote"):
            assert more["params"] == {"limit": 2}
            return httpx.Response(200, json=REMOTE, request=sent)
        if url.endswith("/cache/verify"):
            return httpx.Response(200, json={"ok": False, "error": "page 7 is lost"}, request=sent)
        if url.endswith("/cache/clear"):
            return httpx.Response(200, json={"locked_pages": 3}, request=sent)
        error = {"error": {"message": "a key is needed"}}
        return httpx.Response(401, json=error, request=sent)

    monkeypatch.setattr(httpx, "request", request)
    return asked


def test_a_broken_invariant_of_a_server_is_an_exit_code(server, capsys) -> None:
    assert main(["cache", "verify", "--url", "http://box"]) == 1
    assert "page 7 is lost" in capsys.readouterr().out


def test_decisions_are_shown_with_what_was_expected(server, capsys) -> None:
    assert main(["cache", "decisions", "--request-id", "r7"]) == 0
    out = capsys.readouterr().out
    assert "r7  4,123 tokens; pages: 3 device, 120 host, 5 new" in out
    assert "part: 100 pages loaded, because (all 0.3000 s, none 7.9000 s, chosen 0.2000 s)" in out
    assert "storage: 1 of 2 found, 0 read in 0.500 s: x" in out


def test_ways_of_reading_are_shown_with_what_was_expected(server, capsys) -> None:
    assert main(["cache", "remote", "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    assert "step 9  64 new tokens of 1 requests on 8,192 cached" in out
    assert "    cached send_q, own gather_kv 40 us a layer; cached direct, own direct 95 us" in out
    assert "12 steps with cached send_q, own gather_kv" in err


def test_clear_reaches_the_servers_storage_only_if_asked(server, capsys) -> None:
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "clear", "--storage"]) == 0
    assert [json.loads(sent.content)["storage"] for sent in server] == [False, True]
    assert "hold 3 pages" in capsys.readouterr().out


def test_the_servers_words_are_passed_on(server, capsys) -> None:
    assert main(["cache", "stats", "--api-key", "x"]) == 2
    assert "a key is needed" in capsys.readouterr().err
    assert server[0].headers["authorization"] == "Bearer x"
