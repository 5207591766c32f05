"""Eight threads that call with different shapes at once: ``python -m tests.gpu.threads [seed]``."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Expected, Library, random_inputs, run, upload_all

NUM_THREADS = 8


def draw_problems(rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """A problem for each thread, of the kinds of plan that one pair of head dims can have."""
    problems = []
    for position in range(NUM_THREADS):
        num_queries = (1, 7, 33, 64, 100, 129, 200, 301)[position]
        heads = (2, 4)[position % 2]
        shape = {"heads": heads, "key_heads1": 2, "num_queries": num_queries}
        problems.append(random_inputs(rng, num_keys=150 + 31 * position, **shape))
    return problems


def compute(
    library: Library, problems: list[dict[str, np.ndarray]], repeats: int = 1
) -> list[list[dict[str, np.ndarray]]]:
    """Compute each problem `repeats` times in a thread of its own, all starting together."""
    uploaded = [upload_all(library, inputs) for inputs in problems]
    barrier = threading.Barrier(len(problems))

    def work(arrays: dict[str, Any]) -> list[dict[str, np.ndarray]]:
        barrier.wait()
        options: dict[str, Any] = {"causal": True}
        return [
            run(library, arrays, options, wrt=INPUTS, deterministic=True) for _ in range(repeats)
        ]

    with ThreadPoolExecutor(len(problems)) as pool:
        return list(pool.map(work, uploaded))


def check(
    problems: list[dict[str, np.ndarray]], results: list[list[dict[str, np.ndarray]]]
) -> None:
    """Hold what every thread got against the reference."""
    for inputs, ours in zip(problems, results, strict=True):
        expected = Expected(inputs, {"causal": True})
        for each in ours:
            expected.check(each)


def main() -> None:
    from tests.gpu.card import Cupy

    rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    problems = draw_problems(rng)
    check(problems, compute(Cupy(), problems))
    print("all threads are right")


if __name__ == "__main__":
    main()
