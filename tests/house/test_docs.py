"""The documents are true: flags, files, rooms and commands that they name exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from phloem.bench.compare import render
from phloem.cli.main import COMMANDS
from phloem.cli.serve import make_parser
from phloem.config.load import config_groups
from phloem.config.setting import settings_of
from tests.house.flag_table import SECTIONS, flags_of, markdown
from tests.house.test_house import ROOMS, ROOT

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
ALL_FLAGS = set().union(*(flags_of(command) for command in SECTIONS)) | {"--version"}
# Flags of other programs that our documents show.
FOREIGN_FLAGS = {"--index-url", "--no-deps"}
FOREIGN_FLAGS |= {"--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


BENCHMARKS = ("benchmarks", "benchmarks-avx2")


def flags_of_peers(name: str) -> set[str]:
    """Flags in the command lines that the benchmarks have recorded."""
    document = json.loads(read(f"docs/{name}.json"))
    peers = [peer for run in document["runs"] for peer in run["peers"]]
    lines = [line for peer in peers for line in peer["commands"].values()]
    return {word for line in lines for word in line.split() if word.startswith("--")}


def test_the_flag_page_is_what_the_settings_say() -> None:
    """A flag added, renamed or changed shows here: think twice, then regenerate the page."""
    assert read("docs/flags.md") == markdown()


def test_the_flag_page_knows_every_flag_of_the_parser() -> None:
    flags = {option for option in make_parser()._option_string_actions if option != "-h"}
    assert flags == flags_of("phloem serve")


@pytest.mark.parametrize("name", ["README.md", *DOCS])
def test_every_flag_in_the_documents_exists(name: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", read(name)))
    known = ALL_FLAGS | FOREIGN_FLAGS
    stem = Path(name).stem
    if stem in BENCHMARKS:
        known |= flags_of_peers(stem)
    assert named - known == set()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_page_is_what_its_document_says(name: str) -> None:
    assert read(f"docs/{name}.md") == render(json.loads(read(f"docs/{name}.json")), name)


def test_defaults_in_the_readmes_table_are_the_real_ones() -> None:
    settings = {s.flag: s for cls in config_groups().values() for s in settings_of(cls)}
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*) \|", read("README.md"), re.M)
    assert len(rows) >= 8
    for flag, shown in rows:
        default = settings[flag].default
        if default is None:
            continue  # the text says what it follows from
        real = str(default) if settings[flag].kind is not bool else ("off", "on")[default]
        assert shown.strip().strip("`") == real, flag


@pytest.mark.parametrize("name", ["README.md", *DOCS])
def test_files_in_the_documents_exist(name: str) -> None:
    """Paths in backquotes or links that look like ours."""
    text = read(name)
    pattern = r"(?:phloem|tests|docs)/[\w/.-]*[\w/]"
    named = set(re.findall(rf"`({pattern})(?::[\w.]+)?`", text))
    named |= set(re.findall(r"\]\(([\w/.-]+\.md)\)", text))
    missing = {
        path for path in named if not (ROOT / path).exists() and not (ROOT / "docs" / path).exists()
    }
    assert missing == set()


def test_the_walk_of_one_request_names_functions_that_exist() -> None:
    """Each `file:function` or `file:Class.method` of docs/one_request.md is in that file."""
    places = re.findall(r"`(phloem/[\w/]+\.py):([\w.]+)`", read("docs/one_request.md"))
    assert len(places) >= 20
    for path, name in places:
        assert name in _definitions(ast.parse(read(path)), ""), f"{path}:{name}"


def _definitions(node: ast.AST, prefix: str) -> set[str]:
    out: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            out |= {prefix + child.name} | _definitions(child, f"{prefix}{child.name}.")
    return out


@pytest.mark.parametrize("name", ["README.md", "docs/design.md"])
def test_every_room_is_on_the_map(name: str) -> None:
    """The file tree of the README and the list of rooms in the design name all rooms."""
    text = read(name)
    assert [room for room in ROOMS if not re.search(rf"^\W*`?{room}/", text, re.M)] == []
    named = set(re.findall(r"^  ([a-z]+)/ ", text, re.M))
    assert {room for room in named if not (Path(ROOT) / "phloem" / room).is_dir()} <= {
        "docs",
        "tests",
        "csrc",
    }


def test_every_document_is_linked_from_the_readme() -> None:
    text = read("README.md")
    assert [name for name in DOCS if f"({name})" not in text] == []


def test_commands_in_the_readme_exist() -> None:
    named = set(re.findall(r"^(?:\.venv/bin/)?phloem ([a-z]+)", read("README.md"), re.M))
    assert named
    assert named <= set(COMMANDS)


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    named = set(re.findall(r"\bmake ([a-z-]+)", read("README.md")))
    assert {"serve", "install", "test", "check"} <= named <= targets
