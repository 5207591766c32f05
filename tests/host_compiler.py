"""Compile the plain arithmetic of cuda_src with the host's C++ compiler, and call it by ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from streamkl_cupy import jit

# ISO C++ keeps every product and sum apart, so that what is tested is what is written.
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, in a few words; None if it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed; it compiles the arithmetic of the kernels for the host"
    return None


def load(source: Path, directory: Path) -> ctypes.CDLL:
    """Compile a C++ file that includes headers of cuda_src, and load it.

    Parameters
    ----------
    source
        The file. Its functions must be ``extern "C"``.
    directory
        Where the library goes.
    """
    library = directory / f"{source.stem}.so"
    command = ["g++", *FLAGS, f"-I{jit.source_directory()}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{source.name}:\n{done.stderr}"
    return ctypes.CDLL(str(library))
