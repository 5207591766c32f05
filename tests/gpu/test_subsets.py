"""Any subset of the gradients, and nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Cupy, Expected, backward_plan, random_inputs, run, upload_all

SUBSETS = [names for count in (1, 2, 3, 4) for names in itertools.combinations(INPUTS, count)]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def has(launched: list[tuple[str, dict[str, Any]]], job: str) -> bool:
    """Whether a kernel of this job was launched, of whatever generation."""
    return any(kernel.startswith(f"backward_{job}_sm") for kernel, _ in launched)


def kernels_for(
    wrt: tuple[str, ...], fused: bool, is_hopper: bool
) -> Counter[tuple[str, int | None]]:
    """What a backward has to launch: jobs with the side that they serve, None for both."""
    kernels: Counter[tuple[str, int | None]] = Counter()
    # dQ of both sides in one pass unless a fused kernel has one; dK would need equal groups.
    has_both = {"q1", "q2"} <= {*wrt} and is_hopper and not (fused and {"k1", "k2"} & {*wrt})
    if has_both:
        kernels["backward_dq_both", None] += 1
    for side in sorted({int(name[1]) for name in wrt}):
        kernels["backward_prepare", side] += 1
        wanted = {name[0] for name in wrt if name[1] == str(side)}
        if fused and wanted == {"q", "k"}:
            kernels["backward_fused", side] += 1
            kernels["backward_finish", None] += 1
        else:
            for which in wanted - {"q"} if has_both else wanted:
                kernels[f"backward_d{which}", side] += 1
    return kernels


@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("wrt", SUBSETS, ids="_".join)
def test_a_subset(
    wrt: tuple[str, ...],
    strategy: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: list[tuple[str, dict[str, Any]]],
    is_hopper: bool,
) -> None:
    options = {"causal": True}
    inputs = random_inputs(rng, heads=4, key_heads1=2, key_heads2=1, num_queries=100, num_keys=130)
    expected = Expected(inputs, options, wrt)
    arrays = upload_all(cupy_library, inputs)
    # In any order, and one gradient for each name.
    order = tuple(rng.permutation(wrt).tolist())
    results = run(cupy_library, arrays, options, wrt=order, strategy=strategy, into=True)
    assert set(results) == {"kl", "lse1", "lse2", *("d" + name for name in wrt)}
    expected.check(results)

    ran = [(kernel, template.get("kSide")) for kernel, template in launched]
    backward = Counter((k, side) for k, side in ran if k.startswith("backward"))
    jobs = Counter({(k.partition("_sm")[0], side): count for (k, side), count in backward.items()})
    assert jobs == kernels_for(wrt, strategy == "fused", is_hopper)
    chosen = backward_plan(arrays, options, wrt, strategy=strategy)
    planned = Counter((k.kernel, dict(k.template).get("kSide")) for k in chosen.kernels)
    assert planned == backward


@pytest.mark.parametrize("wrt", SUBSETS, ids="_".join)
def test_the_default_strategy(
    wrt: tuple[str, ...], rng: np.random.Generator, cupy_library: Cupy
) -> None:
    inputs = random_inputs(rng, num_queries=90, num_keys=70)
    arrays = upload_all(cupy_library, inputs)
    Expected(inputs, {}, wrt).check(run(cupy_library, arrays, {}, wrt=wrt))


@pytest.mark.parametrize("wrt", [("q1",), ("q2",), ("q2", "k1")], ids="_".join)
def test_few_queries_on_many_keys(
    wrt: tuple[str, ...],
    rng: np.random.Generator,
    cupy_library: Cupy,
    launched: list[tuple[str, dict[str, Any]]],
) -> None:
    # There blocks of keys fill a card and blocks of queries do not.
    inputs = random_inputs(rng, heads=4, num_queries=5, num_keys=20000)
    arrays = upload_all(cupy_library, inputs)
    Expected(inputs, {}, wrt).check(run(cupy_library, arrays, {}, wrt=wrt, into=True))
    sides = [
        template["kSide"]
        for kernel, template in launched
        if kernel.startswith("backward_fused") or template.get("kHasDq", False)
    ]
    assert sides == [int(wrt[0][1])]
    alone = [template for _, template in launched if not template.get("kHasDq", True)]
    assert (has(launched, "dk") or bool(alone)) == ("k1" in wrt)
    del launched[:]
    run(cupy_library, arrays, {}, wrt=wrt, deterministic=True)
    assert not has(launched, "fused")
    assert not has(launched, "few")


def test_the_gradients_of_the_student_are_the_default(
    rng: np.random.Generator, cupy_library: Cupy
) -> None:
    arrays = upload_all(cupy_library, random_inputs(rng, num_queries=40, num_keys=50))
    dkl = arrays.pop("dkl")
    state = skl.attention_kl(**arrays, return_state=True)
    dq2, dk2 = skl.attention_kl_backward(dkl, **arrays, state=state)
    cupy_library.check(dq2, "bfloat16", arrays["q2"].shape)
    cupy_library.check(dk2, "bfloat16", arrays["k2"].shape)
