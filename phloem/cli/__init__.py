"""The command `phloem`: one entry, subcommands imported when they are called."""

from __future__ import annotations

from phloem.cli.main import main

__all__ = ["main"]
