"""What one process has compiled another one finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """
import sys
import cupy
import numpy as np
import streamkl_cupy as skl

rng = np.random.default_rng(0)
q1, k1, q2, k2 = (
    cupy.asarray(rng.standard_normal((2, n, 64)).astype(np.float16)) for n in (100, 90, 100, 90)
)
state = skl.attention_kl(q1, k1, q2, k2, return_state=True)
dkl = cupy.asarray(np.ones((2, 100), np.float32))
gradients = skl.attention_kl_backward(dkl, q1, k1, q2, k2, state, deterministic=True)
print([float(np.abs(cupy.asnumpy(x).astype(np.float64)).sum()) for x in (state.kl, *gradients)])
print("has a compiler" if "cuda.core" in sys.modules else "has no compiler")
"""


def cached(directory: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of change of all files in a cache."""
    stats = {path.name: path.stat() for path in directory.iterdir()}
    # A use touches a file, so that the least recently used one can be found; a rebuild replaces it.
    return {name: (stat.st_size, stat.st_ino) for name, stat in stats.items()}


def events(stderr: str, what: str) -> list[str]:
    return re.findall(rf"streamkl_cupy: ([^:]*) sm_\w+: {what} ", stderr)


def test_a_second_process_compiles_nothing(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    cache = tmp_path / "cache"
    variables = {"STREAMKL_CACHE_DIR": str(cache), "STREAMKL_DEBUG": "1"}
    first = run_python("-c", SCRIPT, **variables)
    compiled = events(first.stderr, "compiled in")
    assert "has a compiler" in first.stdout
    assert len(compiled) >= 3
    assert sorted(compiled) == sorted(events(first.stderr, "loaded on"))
    files = cached(cache)
    assert len([name for name in files if name.endswith(".cubin")]) == len(compiled)

    second = run_python("-c", SCRIPT, **variables)
    assert "has no compiler" in second.stdout
    assert events(second.stderr, "compiled in") == []
    assert sorted(events(second.stderr, "loaded on")) == sorted(compiled)
    assert cached(cache) == files
    assert second.stdout.splitlines()[0] == first.stdout.splitlines()[0]
