"""The command line: fast and torch-free until a model is wanted; errors are one line, exit 2."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phloem import __version__
from phloem.cli import main
from phloem.cli.bench import MICRO
from phloem.cli.main import COMMANDS


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run, insist on exit code 2 and on exactly one line on stderr; return it."""
    try:
        code = main(words)
    except SystemExit as leave:
        code = leave.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serv",), "did you mean serve?"),
        (("serve", "x", "--prot", "1"), "unknown flag --prot; did you mean --port?"),
        (("serve", "x", "--prot=1"), "did you mean --port?"),
        (("serve", "x", "--port", "abc"), "--port must be a whole number from 0 to 65535"),
        (("serve", "x", "--port", "-1"), "--port must be"),
        (("serve", "x", "--port"), "--port: expected one argument"),
        (("serve", "x", "y"), "unexpected argument 'y'"),
        (("serve",), "no model given"),
        (("serve", "x", "--num-pages", "3", "--kv-memory", "1GB"), "contradict"),
        (("serve", "x", "--config", "a", "--config", "b"), "--config is given twice"),
        (("serve", "x", "--config", "/absent.yaml"), "No such file"),
        (("serve", "/absent/model"), "no such model"),
        (("serve", "x", "--page", "4"), "unknown flag --page"),
        (("bench", "tre"), "did you mean tree?"),
        (("bench", "serve", "--clients", "2", "--rate", "1"), "exclude each other"),
        (("bench", "serve", "--workload", "trace"), "needs --trace FILE"),
        (("bench", "serve", "--url", "ftp://x"), "must begin with http"),
        (("bench", "serve", "--url", "http://127.0.0.1:9"), "no server answers"),
        (("chat", "--url", "http://127.0.0.1:9"), "no server answers"),
        (("chat", "m", "--url", "http://127.0.0.1:9"), "not both"),
        (("replay",), "the following arguments are required"),
        (("replay", "/absent.jsonl"), "No such file"),
        (("replay", "t", "--window-pages", "9"), "--window-pages needs --window"),
        (("replay", "t", "--model", "m", "--window", "9"), "leave it out with --model"),
        (("replay", "t", "--window", "0"), "--window must be a whole number, at least 1"),
        (("serve", "x", "--window-pool-ratio", "2"), "--window-pool-ratio must be a number from"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, *words)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phloem {__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", ["serve", "chat", "replay"])
def test_every_command_has_help_with_an_example(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as leave:
        main([name, "--help"])
    assert leave.value.code == 0
    assert f"  phloem {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*MICRO, "tiers"])
def test_every_micro_bench_has_the_one_face(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`run(quick)` in its module; what it returns is printed in the common form."""
    module = importlib.import_module(f"phloem.bench.{name}")
    assert "quick" in inspect.signature(module.run).parameters
    result = {"name": "x_us", "value": 1.5, "unit": "us", "samples": [1.0, 2.0]}
    monkeypatch.setattr(module, "run", lambda quick, **_: {"bench": name, "results": [result]})
    assert main(["bench", name, "--quick"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["bench"] == name
    assert document["results"][0]["value"] == 1.5
    assert {"cpu", "load_average"} <= set(document["machine"])
    assert "x_us" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parts", "copies,speed"), "there is no part 'speed'"),
        (("--lengths", "256,lots"), "lengths are tokens"),
        (("--pairs", "0"), "--pairs must be at least 1"),
    ],
)
def test_what_bench_tiers_cannot_measure_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(["bench", "tiers", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_is_fast_and_imports_no_torch() -> None:
    """The best of three: a cold start under 0.3 s on a quiet machine, 1 s allowed here."""
    code = (
        "import sys; from phloem.cli import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'rich', 'httpx'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    best = 9.0
    for _ in range(3):
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        best = min(best, time.perf_counter() - begin)
        assert done.returncode == 0, done.stderr
    assert best < 1.0


@pytest.mark.parametrize("name", ["serve", "bench"])
def test_flag_errors_import_no_torch(name: str) -> None:
    code = (
        "import sys\nfrom phloem.cli import main\n"
        f"try: main([{name!r}, '--nonsense'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m phloem.cli --help | head -0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
