"""The house rules that a linter does not know, as ratchets: bad counts may only shrink."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "phloem"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Files over 400 lines and functions over 60, with their present size: take out, never add.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# kv/spec.py is the only place that knows how attention is shaped and how numbers are stored.
KIND_OR_DTYPE = re.compile(
    r"\b(mha|mqa|gqa|mla|swa|fp32|fp16|bf16|fp8|fp4|mxfp4|nvfp4|e4m3|e5m2|bfloat16|float16)\b", re.I
)
BLIND_ROOMS = ("replica", "cache", "tiers", "sched", "loop")
TORCH_FREE = ("core", "config", "kv", "replica", "cache", "tiers", "sched", "loop", "sim", "stores")


def sources(*rooms: str) -> list[Path]:
    folders = [PACKAGE / room for room in rooms] or [PACKAGE]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_import_contracts_hold() -> None:
    """Wings, layers, torch-free rooms: pyproject.toml, [tool.importlinter]."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_stands_in_a_contract() -> None:
    first = PYPROJECT["tool"]["importlinter"]["contracts"][0]
    placed = {room.strip() for layer in first["layers"] for room in re.split(r"[:|]", layer)}
    assert first["exhaustive"] is True
    assert placed == set(ROOMS)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_the_control_plane_starts_without_torch(room: str) -> None:
    """Measured, not read: no import of the room brings torch in, by whatever path."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(room)
    ]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\n"
    code += "sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sources(*BLIND_ROOMS), ids=name_of)
def test_the_cache_is_blind_to_attention_kind_and_dtype(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = [f"line {i}: {line}" for i, line in enumerate(text.splitlines(), 1) if _names(line)]
    assert not named


def _names(line: str) -> bool:
    return KIND_OR_DTYPE.search(line) is not None


def test_the_grep_for_kinds_can_find_one() -> None:
    assert _names("kind = AttentionKind.GQA")
    assert _names("# half of that in BF16")
    assert not _names("the retention of a component")


def test_no_file_grows_beyond_400_lines() -> None:
    sizes = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources()}
    too_long = {n: size for n, size in sizes.items() if size > LONG_FILES.get(n, 400)}
    assert not too_long
    assert all(sizes.get(n, 0) > 400 for n in LONG_FILES), "a file shrank: take it off the list"


def test_no_function_grows_beyond_60_lines() -> None:
    sizes: dict[str, int] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                sizes[f"{name_of(path)}:{node.name}"] = node.end_lineno - node.lineno + 1
    too_long = {n: size for n, size in sizes.items() if size > LONG_FUNCTIONS.get(n, 60)}
    assert not too_long
    assert all(sizes.get(n, 0) > 60 for n in LONG_FUNCTIONS), "one shrank: take it off the list"


def test_sources_are_ascii_and_modules_say_what_they_are_for() -> None:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), name_of(path)
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} has no docstring"


def test_no_broad_except_without_a_reason() -> None:
    """`except Exception` and bare `except` end in `raise`, or have a comment beside them."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                near = "".join(lines[node.lineno - 1 : node.lineno + 1])
                reason = "#" in near or isinstance(node.body[-1], ast.Raise)
                assert reason, f"{name_of(path)}:{node.lineno}"


def _is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or (
        isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    )


def test_requirements_are_exact_and_cover_the_package() -> None:
    pins = _pins("requirements.txt") | _pins("requirements-dev.txt")
    project = PYPROJECT["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in wanted:
        name = re.split(r"[<>=;\[ ]", requirement)[0]
        assert _norm(name) in pins, f"{name} is not pinned"


def test_every_install_names_the_same_torch() -> None:
    wanted = "torch==" + _pins("requirements.txt")["torch"]
    for name in ("Makefile", "README.md"):
        found = set(re.findall(r"torch==[\d.]*\d", (ROOT / name).read_text(encoding="utf-8")))
        assert found == {wanted}, name


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", entry) for entry in entries), name
    return {_norm(entry.split("==")[0]): entry.split("==")[1] for entry in entries}


def _norm(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
