"""The real attention that the package ships, on the card."""

from __future__ import annotations

import importlib.resources
import itertools

import numpy as np
import pytest

from streamkl_cupy import cli
from streamkl_cupy.problem import INPUTS
from tests.cases import DTYPES
from tests.gpu.card import Expected, Library, run, upload_all

MEAN_KL, MAX_KL = 2.279408821, 10.476518994


@pytest.fixture(scope="module")
def passages() -> list[dict[str, np.ndarray]]:
    """``q1 k1 q2 k2`` of each passage, as views of the packed arrays."""
    path = importlib.resources.files("streamkl_cupy") / "data" / "minilm_attention_qk.npz"
    with path.open("rb") as file, np.load(file) as sample:
        keys = ("q_teacher", "k_teacher", "q_student", "k_student")
        packed = dict(zip(INPUTS, (sample[key] for key in keys), strict=True))
        bounds = sample["cu_seqlens"].tolist()
    return [
        {name: array[:, start:stop] for name, array in packed.items()}
        for start, stop in itertools.pairwise(bounds)
    ]


def with_mean_as_loss(passage: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    shape = passage["q1"].shape[:-1]
    return passage | {"dkl": np.full(shape, 1 / np.prod(shape), np.float32)}


def test_the_last_passage(passages: list[dict[str, np.ndarray]], library: Library) -> None:
    inputs = with_mean_as_loss(passages[-1])
    kl = run(library, upload_all(library, inputs), {}, wrt=())["kl"].astype(np.float64)
    assert MEAN_KL == cli.SAMPLE_MEAN_KL
    assert kl.mean() == pytest.approx(MEAN_KL, rel=1e-6)
    assert kl.max() == pytest.approx(MAX_KL, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("strategy", ["fused", "separate"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_output(
    causal: bool,
    strategy: str,
    dtype: str,
    passages: list[dict[str, np.ndarray]],
    library: Library,
) -> None:
    for passage in passages:
        inputs = with_mean_as_loss(passage)
        for name in INPUTS:
            if dtype != "float16":
                inputs[name] = inputs[name].astype(DTYPES[dtype])
        options = {"causal": causal}
        arrays = upload_all(library, inputs)
        results = run(library, arrays, options, strategy=strategy, into=True)
        Expected(inputs, options).check(results)
