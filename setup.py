"""Builds the native CPU kernels (csrc) with the package; everything else is in pyproject.toml.

Needs CMake and a C++17 compiler. Where they are missing, or the build fails, the package installs
without them, with a warning: PyTorch's kernels are used then. PHLOEM_NATIVE=0 skips the build,
PHLOEM_NATIVE=1 makes a failed build an error.

An editable install leaves the library in build/csrc, where the checkout finds it; a wheel carries
it in phloem/kernels/_native.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "csrc"
LIBRARY = BUILD / "libphloem_cpu.so"
MODE = os.environ.get("PHLOEM_NATIVE", "auto")


def build_native() -> bool:
    """Whether the library stands in build/csrc now."""
    if MODE == "0":
        return False
    cmake = shutil.which("cmake")
    try:
        if cmake is None:
            raise FileNotFoundError("there is no cmake")
        configure = ["-S", str(ROOT / "csrc"), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
        subprocess.run([cmake, *configure], check=True)
        subprocess.run([cmake, "--build", str(BUILD), "-j", str(os.cpu_count() or 1)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if MODE == "1":
            raise
        print(f"warning: native CPU kernels not built ({error}); PyTorch's are used instead")
        return False
    return True


class BuildWithNative(build_py):
    """build_py, and the library beside it."""

    def run(self) -> None:
        super().run()
        if build_native() and not self.editable_mode:
            target = Path(self.build_lib) / "phloem" / "kernels" / "_native"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(LIBRARY, target / LIBRARY.name)


class NativeDistribution(Distribution):
    """A wheel that carries the library is for one platform."""

    def has_ext_modules(self) -> bool:
        return MODE != "0" and shutil.which("cmake") is not None


setup(cmdclass={"build_py": BuildWithNative}, distclass=NativeDistribution)
