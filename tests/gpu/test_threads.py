"""Threads that call at once, with a warm cache and a cold one; and a fork."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu import threads
from tests.gpu.card import Cupy, Library, same_bits


def test_eight_threads_with_different_shapes(library: Library, rng: np.random.Generator) -> None:
    problems = threads.draw_problems(rng)
    results = threads.compute(library, problems, repeats=4)
    threads.check(problems, [ours[:1] for ours in results])
    for first, *others in results:
        for other in others:
            for name in first:
                assert same_bits(other[name], first[name]), name


def test_eight_threads_with_the_same_shape(cupy_library: Cupy, rng: np.random.Generator) -> None:
    # The same plan and the same kernels, and different numbers.
    like = threads.draw_problems(rng)[-1]
    problems = [
        {n: np.ascontiguousarray(rng.permutation(x, axis=-1)) for n, x in like.items()}
        for _ in range(threads.NUM_THREADS)
    ]
    threads.check(problems, threads.compute(cupy_library, problems, repeats=2))


def test_eight_threads_and_a_cold_cache(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    cache = tmp_path / "cache"
    variables = {"STREAMKL_CACHE_DIR": str(cache), "STREAMKL_DEBUG": "1"}
    done = run_python("-m", "tests.gpu.threads", **variables)
    assert "all threads are right" in done.stdout
    # Kernels were wanted by several threads at once, and each was compiled and loaded once.
    compiled, loaded = (
        Counter(re.findall(rf"streamkl_cupy: ([^:]*) sm_\w+: {what} ", done.stderr))
        for what in ("compiled in", "loaded on")
    )
    assert len(compiled) >= 8
    assert set(compiled.values()) == set(loaded.values()) == {1}
    assert compiled == loaded
    assert len(list(cache.glob("*.cubin"))) == len(compiled)


FORKED = """
import os, sys, warnings
import cupy
import numpy as np
import streamkl_cupy as skl

x = cupy.asarray(np.ones((2, 40, 64), np.float16))
before = skl.attention_kl(x, x, x, x)
warnings.simplefilter("ignore")  # that a process with threads forks
child = os.fork()
if child == 0:
    try:
        skl.attention_kl(x, x, x, x)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    print("a call in a forked process was not refused", file=sys.stderr, flush=True)
    os._exit(2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
# The parent goes on.
assert (cupy.asnumpy(skl.attention_kl(x, x, x, x)) == 0).all()
"""


def test_a_forked_process_is_told_so(run_python: Callable[..., Any]) -> None:
    message = run_python("-c", FORKED).stdout
    assert "forked" in message
    assert "spawn" in message
