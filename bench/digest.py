"""Digests of the code that a recorded result depends on: ``python -m bench.digest`` prints them.

Only files that can change a result count (CUDA sources and Python), so that a word changed in a
README does not make every record look stale.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORIES = ("cuda_src", "streamkl_cupy")
SUFFIXES = (".cu", ".cuh", ".py")


def tree_digest(directory: Path) -> str:
    """SHA-256 over the paths and contents of the sources below a directory.

    Parameters
    ----------
    directory
        A directory; files whose suffix is not in ``SUFFIXES`` do not count.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    FileNotFoundError
        If there is no source below the directory.
    """
    files = {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    }
    if not files:
        raise FileNotFoundError(f"{directory}: expected sources ({', '.join(SUFFIXES)}), got none")
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def digests(root: Path = ROOT) -> dict[str, str]:
    """The digest of each of ``DIRECTORIES`` under the root of a checkout, by name."""
    return {name: tree_digest(root / name) for name in DIRECTORIES}


if __name__ == "__main__":
    for directory_name, value in digests().items():
        print(f"{value}  {directory_name}")
