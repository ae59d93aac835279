"""Code for processors that are not here: emulated, trapped, and looked at."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from phloem.kernels.native_abi import ISA_NUMBERS, CpuIsa
from tests.kernels.native_build import build, emulated_build, native_library

# Units that may hold instructions with such registers.
WIDE = {
    "zmm": ("isa_avx512", "bf16_avx512", "bf16_amx_attention"),
    "ymm": ("isa_avx", "bf16_"),
    "tmm": ("bf16_amx",),
}


@pytest.mark.parametrize(
    "program", ["phloem_cpu_test", "phloem_cpu_trap", "phloem_cpu_processor_test"]
)
def test_a_program_of_the_emulated_build_finds_nothing(program):
    """Results bit for bit as the instructions are documented; the shipped object of the tile
    kernels under a handler of illegal instructions; what of CPUID counts."""
    path = emulated_build() / program
    if not path.exists():
        pytest.skip("this assembler has no tiles")
    done = subprocess.run([str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout


def test_wide_instructions_stand_only_in_their_own_units():
    """An inline function that two units share would crash older processors: the linker keeps one
    copy, of whichever unit."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(native_library())],
        capture_output=True,
        text=True,
        check=True,
    )
    function, seen, wrong = "", set(), set()
    for line in done.stdout.splitlines():
        if line.endswith(">:"):
            function = line
        for register in set(re.findall(r"%([tyz]mm)\d", line)):
            seen.add(register)
            if not any(unit in function for unit in WIDE[register]):
                wrong.add((register, function))
    assert not wrong
    if "amx" in done.stdout or "tdpbf16ps" in done.stdout:
        assert seen == set(WIDE)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_compiler_without_these_instructions_builds_the_rest():
    """As if neither the flag nor the assembler knew them: the library lacks those two paths."""
    where = build("csrc-old", "-DPHLOEM_FLAG_AVX512BF16=OFF", "-DPHLOEM_ASM_AMX=OFF")
    library = ctypes.CDLL(str(where / "libphloem_cpu.so"))
    missing = [
        library.phloem_isa_supported(ISA_NUMBERS[isa]) for isa in (CpuIsa.AVX512BF16, CpuIsa.AMX)
    ]
    assert missing == [0, 0]
    assert library.phloem_self_test(ISA_NUMBERS[CpuIsa.PLAIN]) == 0
