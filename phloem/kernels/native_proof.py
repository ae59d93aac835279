"""Instruction sets beyond AVX2: taken by `auto` only after a self-test right here.

A child process runs the library's self-test on the path in question, so that an illegal instruction
or an endless loop harms nobody. The verdict is kept in the user's cache folder for this processor,
library and operating system. Imports no torch; the child imports nothing of Phloem.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phloem.kernels import native_abi as abi
from phloem.kernels.native_abi import CpuIsa

__all__ = [
    "Finding",
    "Verdict",
    "best_isa",
    "examine",
    "finding_of",
    "trusted",
    "trusted_isas",
    "verdicts_path",
]

logger = logging.getLogger(__name__)

# Best first. Dot products of bf16 come last: where they were measured, multiply-adds were faster.
UNPROVEN = (CpuIsa.AMX, CpuIsa.AVX512, CpuIsa.AVX512BF16)
# The self-test takes 0.3 s where the instructions are emulated.
TIMEOUT_S = 30.0
KEPT_MACHINES = 16

_CHILD = """
import ctypes, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
library = ctypes.CDLL(sys.argv[1])
library.phloem_last_error.restype = ctypes.c_char_p
code = library.phloem_self_test(int(sys.argv[2]))
print({0: "right", -3: "refused"}.get(code, "wrong"))
if code:
    print(library.phloem_last_error().decode())
"""


class Verdict(enum.Enum):
    """What came of a self-test."""

    RIGHT = "right"
    WRONG = "wrong"
    CRASHED = "crashed"
    HUNG = "hung"
    REFUSED = "refused"  # by the operating system, or no child could be started: asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A verdict and, unless it is RIGHT, what was seen."""

    verdict: Verdict
    detail: str = ""


def trusted_isas() -> Iterator[CpuIsa]:
    """What `auto` may take, best first; tested one by one as they are asked for."""
    library, path = abi.library(), abi.library_path()
    for isa in UNPROVEN:
        if path is None or not library.phloem_isa_supported(abi.ISA_NUMBERS[isa]):
            continue
        if trusted(isa, path):
            yield isa
    best = library.phloem_best_isa()
    yield from (isa for isa, number in reversed(abi.ISA_NUMBERS.items()) if number <= best)


def best_isa() -> CpuIsa:
    """What native kernels run on: what PHLOEM_CPU_ISA names, or the best that is trusted."""
    wanted = abi.chosen_isa()
    return next(trusted_isas()) if wanted is CpuIsa.AUTO else wanted


@functools.cache
def trusted(isa: CpuIsa, library: Path) -> bool:
    """Whether the self-test lets `isa` pass; asked and, if it does not, reported once a process."""
    finding = finding_of(isa, library)
    if finding.verdict is Verdict.RIGHT:
        return True
    logger.warning(
        "native kernels: %s is not used on this machine; self-test: %s (%s)",
        isa.value,
        finding.verdict.value,
        finding.detail,
    )
    return False


def finding_of(isa: CpuIsa, library: Path, *, timeout_s: float = TIMEOUT_S) -> Finding:
    """The remembered finding for this machine, or that of a self-test, which is then remembered."""
    where, machine = verdicts_path(), _machine(library)
    known = _remembered(where).get(machine, {}).get(isa.value)
    if known is not None:
        return known
    finding = examine(isa, library, timeout_s=timeout_s)
    if finding.verdict is not Verdict.REFUSED:
        _remember(where, machine, isa, finding)
    return finding


def examine(isa: CpuIsa, library: Path, *, timeout_s: float = TIMEOUT_S) -> Finding:
    """Run the self-test of `library` on `isa` in a process of its own."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(library), str(abi.ISA_NUMBERS[isa])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Finding(verdict=Verdict.HUNG, detail=f"no answer in {timeout_s:g} s")
    except OSError as error:
        return Finding(verdict=Verdict.REFUSED, detail=f"no child process: {error}")
    if done.returncode < 0:
        return Finding(verdict=Verdict.CRASHED, detail=_signal_name(-done.returncode))
    word, _, detail = done.stdout.strip().partition("\n")
    # Only the word itself is a pass: a library that ends the process early has proven nothing.
    if done.returncode == 0 and word in {"right", "wrong", "refused"}:
        return Finding(verdict=Verdict(word), detail=detail)
    last = done.stderr.strip().rpartition("\n")[2]
    return Finding(verdict=Verdict.CRASHED, detail=last or f"exit code {done.returncode}")


def verdicts_path() -> Path:
    """The file of remembered findings; deleting it makes every path be tested again."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "phloem" / "cpu-paths.json"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _machine(library: Path) -> str:
    """Changes with the processor, the library and the kernel of the operating system."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    text = "\n".join((_cpu_model(), digest, platform.release()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cpu_model() -> str:
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.processor()
    first = text.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.partition(":")[0].strip() in wanted)


def _remembered(where: Path) -> dict[str, dict[str, Finding]]:
    """Findings by machine and instruction set; nothing of a file that is not understood."""
    try:
        document = json.loads(where.read_text(encoding="utf-8"))
        return {
            machine: {
                isa: Finding(verdict=Verdict(entry["verdict"]), detail=str(entry["detail"]))
                for isa, entry in entries.items()
            }
            for machine, entries in document.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(where: Path, machine: str, isa: CpuIsa, finding: Finding) -> None:
    """Add a finding. Where nothing can be written, the next process tests again."""
    known = _remembered(where)
    entries = known.pop(machine, {}) | {isa.value: finding}
    kept = list(known.items())[-(KEPT_MACHINES - 1) :] + [(machine, entries)]
    document = {
        key: {
            name: {"verdict": found.verdict.value, "detail": found.detail}
            for name, found in of_machine.items()
        }
        for key, of_machine in kept
    }
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=where.parent, prefix=where.name)
    except OSError as error:
        logger.debug("the self-test's finding is not kept: %s", error)
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(name, where)
    except OSError as error:
        logger.debug("the self-test's finding is not kept: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(name)
