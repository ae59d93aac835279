"""A virtual environment of its own for each peer, made once and found again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phloem.bench.compare.peer import PeerUnavailable, Say

__all__ = ["Environment"]

INSTALL_LIMIT_S = 3600.0
_MARK = "phloem-ready.json"


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with an interpreter. `pins` are installed one command after another.

    An environment counts as ready only if its mark names the same pins: one that was cut short,
    or made for other versions, is made anew.
    """

    folder: Path
    pins: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def scripts(self) -> Path:
        return self.folder / "bin"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def is_ready(self) -> bool:
        """Whether a finished environment with these pins is there."""
        try:
            mark = json.loads((self.folder / _MARK).read_text())
        except (OSError, ValueError):
            return False
        return mark == self._mark() and self.python.exists()

    def make(self, say: Say) -> None:
        """Create it and install. Call `finish` once it works. Raises PeerUnavailable."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        say(f"making {self.folder}")
        self._run([sys.executable, "-m", "venv", str(self.folder)], "venv")
        for packages in self.pins:
            say(f"installing {' '.join(packages)} (minutes, once)")
            self.pip("install", *packages)

    def finish(self) -> None:
        """Mark it as ready."""
        (self.folder / _MARK).write_text(json.dumps(self._mark()))

    def pip(self, *words: str) -> None:
        """Run pip inside. Raises PeerUnavailable with its last line."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "-q", *words]
        self._run(command, " ".join(["pip", *words]))

    def imports(self, module: str) -> bool:
        """Whether a module can be imported inside."""
        command = [str(self.python), "-c", f"import {module}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution; None if it is not there."""
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        run = subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, check=False
        )
        return run.stdout.strip() if run.returncode == 0 else None

    def run_script(self, script: Path, *words: str) -> None:
        """Run a script of ours inside. Raises PeerUnavailable with its last line."""
        self._run([str(self.python), "-P", str(script), *words], script.name)

    def _mark(self) -> list[list[str]]:
        return [list(packages) for packages in self.pins]

    def _run(self, command: Sequence[str], name: str) -> None:
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise PeerUnavailable(f"{name}: not done after {INSTALL_LIMIT_S:.0f} s") from None
        if run.returncode != 0:
            lines = [line for line in (run.stderr or run.stdout).splitlines() if line.strip()]
            raise PeerUnavailable(f"{name} failed: {lines[-1].strip() if lines else 'no reason'}")
