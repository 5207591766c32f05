"""Every kernel once or twice on small shapes, through CuPy alone: ``python -m tests.gpu.smoke``.

What compute-sanitizer watches, so no time goes into anything else. The values are tested elsewhere;
here they only have to be finite. With ``--all-lanes`` every lane of a warp arrives at its barriers
(``cuda_src/ptx/mbarrier.cuh``), without which the race checker sees races that are none. With
``--part K N`` only every Nth of the runs is made, from K on.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import streamkl_cupy as skl
from streamkl_cupy import jit, launch, plan
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import (
    Cupy,
    backward_plan,
    forward_plan,
    problem_of,
    random_inputs,
    run,
    upload,
)

HEADS = {"heads": 4, "key_heads1": 2, "key_heads2": 1}
EQUAL_GROUPS = {"key_heads2": 2}
# Dtype, lengths, options, splits of the keys, and by how many bytes inputs are off alignment.
RUNS = (
    ("bfloat16", {"num_queries": 130, "num_keys": 150}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 150, "num_keys": 40}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 70, "num_keys": 130}, {}, 3, 0),
    ("bfloat16", {"num_queries": 33, "num_keys": 150}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 3, "num_keys": 300}, {"causal": True}, 4, 0),
    ("float16", {"num_queries": 3, "num_keys": 300}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 100, "num_keys": 90}, {"causal": True}, 1, 2),
    ("float16", {"num_queries": 130, "num_keys": 150}, {"causal": True}, 1, 0),
    ("bfloat16", {"num_queries": 200, "num_keys": 170} | EQUAL_GROUPS, {"causal": True}, 1, 0),
    ("float16", {"num_queries": 170, "num_keys": 200} | EQUAL_GROUPS, {}, 1, 0),
    ("bfloat16", {"num_queries": 400, "num_keys": 300}, {"window": (40, 30)}, 1, 0),
    ("bfloat16", {"num_queries": 100, "num_keys": 90}, {"window": (20, 5), "q_offset": 30}, 2, 2),
    ("float16", {"num_queries": 3, "num_keys": 600}, {"window": (300, 0)}, 2, 0),
    ("float32", {"num_queries": 90, "num_keys": 600}, {"causal": True}, 2, 0),
    ("float32", {"num_queries": 600, "num_keys": 70}, {"precision": "tf32"}, 1, 4),
    ("bfloat16", {"num_queries": 130, "num_keys": 150}, {"softcap1": 1.0, "causal": True}, 1, 0),
    ("float16", {"num_queries": 33, "num_keys": 300}, {"softcap1": 5.0, "softcap2": 1.0}, 2, 0),
    ("bfloat16", {"num_queries": 100, "num_keys": 90}, {"softcap2": 1.0}, 1, 2),
)
# Lengths of arrays and of what is there, packed or padded, and splits of the keys.
RAGGED = (
    (
        "bfloat16",
        (260, 280),
        {"cu_seqlens_q": (0, 130, 131, 250), "cu_seqlens_k": (3, 90, 90, 280)},
        1,
    ),
    ("float16", (70, 300), {"cu_seqlens_q": (0, 3, 70), "cu_seqlens_k": (0, 250, 300)}, 2),
    ("bfloat16", (130, 150), {"kv_starts": (40,), "kv_lens": (70,), "q_lens": (100,)}, 1),
)


def let_all_lanes_arrive(directory: Path) -> None:
    """Build from a copy of the sources, in the directory, that differs in this alone."""
    copy = directory / "cuda_src"
    shutil.copytree(jit.source_directory(), copy)
    header = copy / "ptx" / "mbarrier.cuh"
    text = header.read_text(encoding="utf-8")
    changed = text.replace("kAllLanesArrive = false", "kAllLanesArrive = true")
    assert changed != text
    header.write_text(changed, encoding="utf-8")
    jit.source_directory = lambda: copy


def run_states(library: Cupy, rng: np.random.Generator) -> set[str]:
    """Entropies, given log-sum-exps and merged states; returns the kernels behind the forward."""
    inputs = random_inputs(rng, "bfloat16", **HEADS, num_queries=70, num_keys=90)
    arrays = {name: upload(library, values) for name, values in inputs.items()}
    qk = [arrays[name] for name in INPUTS]
    with plan.override(num_splits=2):
        entropies = skl.attention_kl(*qk, return_entropy=True)
        given = {"lse1": entropies.lse1, "lse2": entropies.lse2}
        state = skl.attention_kl(*qk, **given, return_state=True)
    gradients = skl.attention_kl_backward(arrays["dkl"], *qk, state, wrt=INPUTS)
    own = skl.attention_kl(*qk, return_state=True)
    merged = skl.merge_states(*(own,) * (plan.MERGED_AT_ONCE + 1))
    for values in (entropies.entropy, state.kl, merged.kl, *gradients):
        assert np.isfinite(library.get(values).astype(np.float32)).all()
    facts = launch.device_facts(0)
    problem = problem_of(arrays, {})
    behind = plan.forward(problem, facts, given=("lse1", "lse2")).kernels[-1]
    return {behind.kernel, *(step.kernel for step in plan.merge(1, 2, facts).kernels)}


def run_ragged(
    library: Cupy,
    rng: np.random.Generator,
    dtype: str,
    shape: tuple[int, int],
    lengths: dict[str, tuple[int, ...]],
    num_splits: int,
) -> set[str]:
    """A padded or packed batch; returns the kernels of its forward."""
    num_queries, num_keys = shape
    inputs = random_inputs(rng, dtype, **HEADS, num_queries=num_queries, num_keys=num_keys)
    if "cu_seqlens_q" in lengths:
        inputs = {n: x[0] if n == "dkl" else x[0].swapaxes(0, 1) for n, x in inputs.items()}
    arrays = {name: upload(library, values) for name, values in inputs.items()}
    on_card = {n: upload(library, np.array(x, np.int32)) for n, x in lengths.items()}
    generations = ({}, {"forward_kernel": "forward_sm80", "backward_kernel": plan.PORTABLE})
    ran = set()
    for kernels, strategy in itertools.product(generations, ("fused", "separate")):
        with plan.override(num_splits=num_splits, **kernels):
            options = {"causal": True, **on_card}
            ran |= {kernel.kernel for kernel in forward_plan(arrays, options).kernels}
            assert_finite(run(library, arrays, options, strategy=strategy, into=True))
    print(f"ran {dtype} {lengths} splits {num_splits}", flush=True)
    return ran


def run_plain(
    library: Cupy,
    rng: np.random.Generator,
    dtype: str,
    lengths: dict[str, int],
    options: dict[str, Any],
    num_splits: int,
    offset: int,
) -> set[str]:
    """One of `RUNS`; returns its kernels."""
    inputs = random_inputs(rng, dtype, **(HEADS | lengths))
    arrays = {n: upload(library, x, offset * (n in INPUTS)) for n, x in inputs.items()}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"strategy": "separate"})]
    if dtype != "float32":
        ordered = {"strategy": "fused", "both": False}
        ways += [({}, {"strategy": "fused"}), (ordered, {"deterministic": True})]
    ran = set()
    for overrides, choices in ways:
        with plan.override(num_splits=num_splits, **overrides):
            ran |= {kernel.kernel for kernel in forward_plan(arrays, options).kernels}
            chosen = backward_plan(arrays, options, INPUTS, **choices)
            if overrides and chosen.sides[0].strategy == "separate":
                continue  # those have run
            ran |= {kernel.kernel for kernel in chosen.kernels}
            assert_finite(run(library, arrays, options, into=True, **choices))
    print(f"ran {dtype} {lengths} {options} splits {num_splits} offset {offset}", flush=True)
    return ran


def assert_finite(results: dict[str, np.ndarray]) -> None:
    for name, values in results.items():
        # A row without keys has a log-sum-exp of -inf.
        assert np.isfinite(values.astype(np.float32)).all() or name.startswith("lse"), name


def main(part: int = 0, num_parts: int = 1) -> None:
    library, rng = Cupy(), np.random.default_rng(part)
    jobs = [
        lambda: run_states(library, rng),
        *(functools.partial(run_plain, library, rng, *one) for one in RUNS),
        *(functools.partial(run_ragged, library, rng, *one) for one in RAGGED),
    ]
    ran: set[str] = set()
    for job in jobs[part::num_parts]:
        ran |= job()
        cupy.cuda.Device().synchronize()
    if num_parts == 1:
        missing = {path.stem for path in jit.source_directory().glob("*.cu")} - ran
        assert not missing, f"never launched: {sorted(missing)}"
        print("every kernel ran", flush=True)
    else:
        print(f"part {part} of {num_parts} ran", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--all-lanes", action="store_true")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if chosen.all_lanes:
            let_all_lanes_arrive(Path(place))
        main(*chosen.part)
