"""docs/flags.md, generated: `python -m tests.house.flag_table > docs/flags.md`."""

from __future__ import annotations

from phloem.bench.compare import CompareOptions
from phloem.bench.prefix import PrefixOptions
from phloem.bench.profile import ProfileOptions
from phloem.bench.serve import LoadOptions, TargetOptions
from phloem.cli.chat import ChatOptions
from phloem.cli.replay import ReplayOptions
from phloem.config.load import config_groups
from phloem.config.setting import Setting, settings_of

# Flags that are no settings: (command, flag, what it does).
PLAIN = (
    ("phloem serve", "--config", "YAML file that may hold every flag of `serve`"),
    ("phloem replay", "--json", "print one JSON document as the last line"),
    ("phloem cache", "--url", "a running server; default: http://127.0.0.1:8000"),
    ("phloem cache", "--api-key", "bearer token to send"),
    ("phloem cache", "--json", "print one JSON document"),
    ("phloem cache", "--limit", "lines of `ls` and `decisions`"),
    ("phloem cache", "--request-id", "`decisions`: of this request alone"),
    ("phloem cache", "--storage", "`clear`: the server's directory too; `warm`: the one to fill"),
    ("phloem cache", "--storage-size", "`warm`: what the directory may hold"),
    ("phloem cache", "--model", "`warm`: model to compute with"),
    ("phloem bench prefix", "--url", "a running server; default: start one"),
    ("phloem bench prefix", "--model", "model to start, or its name at `--url`"),
    ("phloem bench prefix", "--api-key", "bearer token to send to `--url`"),
    ("phloem bench prefix", "--serve-flags", "flags of the server to start, in one argument"),
    (
        "phloem bench tree",
        "--quick",
        "fewer samples (`sched`, `stores`, `kernels`, `tiers`, `window` as well)",
    ),
    ("phloem bench tiers", "--parts", "which of copies, stores, overlap, ttft; default: all"),
    ("phloem bench tiers", "--lengths", "`ttft`: lengths of prefixes, as 256,1024,4096,8000"),
    ("phloem bench tiers", "--pairs", "`ttft`: pairs of each length and tier; default: 30"),
)
SECTIONS: dict[str, tuple[type, ...]] = {
    "phloem serve": tuple(config_groups().values()),
    "phloem chat": (ChatOptions,),
    "phloem replay": (ReplayOptions,),
    "phloem cache": (),
    "phloem bench serve": (TargetOptions, LoadOptions),
    "phloem bench prefix": (PrefixOptions,),
    "phloem bench compare": (CompareOptions,),
    "phloem bench profile": (ProfileOptions,),
    "phloem bench tree": (),
    "phloem bench tiers": (),
}


def markdown() -> str:
    """The whole page."""
    parts = [
        "# Every flag",
        "",
        "Generated from the settings (`python -m tests.house.flag_table`); a test keeps it true.",
        "",
        "A switch such as `--overlap` has its opposite, `--no-overlap`. In a YAML file",
        "(`phloem serve --config FILE`) the same names are keys, with dashes or underscores:",
        "`page-size: 16`.",
    ]
    for command, classes in SECTIONS.items():
        parts += ["", f"## {command}", "", "| flag | default | what it does |", "|---|---|---|"]
        parts += [f"| `{flag}` | | {doc} |" for name, flag, doc in PLAIN if name == command]
        parts += [_row(item) for cls in classes for item in settings_of(cls)]
    return "\n".join(parts) + "\n"


def flags_of(command: str) -> set[str]:
    """Every spelling of every flag of a command."""
    out = {flag for name, flag, _ in PLAIN if name == command} | {"--help"}
    for cls in SECTIONS[command]:
        for item in settings_of(cls):
            if item.positional:
                continue
            names = [item.flag, *(f"--{alias}" for alias in item.aliases)]
            out.update(names)
            if item.kind is bool:
                out.update("--no-" + name.removeprefix("--") for name in names)
    return out


def _row(item: Setting) -> str:
    name = f"`{item.name.upper()}`" if item.positional else f"`{item.flag}`"
    others = "".join(f", `--{alias}`" for alias in item.aliases)
    choices = f" ({', '.join(item.choices)})" if item.choices else ""
    return f"| {name}{others} | {_default(item)} | {item.doc}{choices} |"


def _default(item: Setting) -> str:
    if item.default in (None, ""):
        return ""
    if item.kind is bool:
        return "on" if item.default else "off"
    return str(item.default)


if __name__ == "__main__":
    print(markdown(), end="")
