"""The command line on a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import audit, cli


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> Any:
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_the_demo_computes_on_the_card(run_json: Any) -> None:
    payload = run_json("demo")
    assert payload["computed_by"] == cli.find_card()[1]
    assert payload["passes"] is True
    assert payload["passages"][-1]["mean_kl"] == pytest.approx(2.279408821, rel=1e-5)
    # The kernels compute in float32: an error of exactly 0 would be the reference's own.
    assert all(passage["outputs"][0]["error"] > 0 for passage in payload["passages"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_audit_holds_on_the_card(run_json: Any, dtype: str) -> None:
    words = "--num-heads 4 --num-key-heads2 2 --num-queries 200 --num-keys 300 --head-dim2 64"
    payload = run_json("audit", "--dtype", dtype, "--causal", *words.split())
    assert payload["computed_by"] == cli.find_card()[1]
    assert payload["passes"] is True
    assert payload["outputs"][0]["error"] > 0


def test_arrays_that_no_kernel_takes_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import numpy as np

    arrays = audit.random_problem(num_queries=4, num_keys=4, head_dim1=8, dtype="float64")
    np.savez(tmp_path / "mine.npz", **arrays)
    assert cli.main(["audit", "--npz", str(tmp_path / "mine.npz")]) == cli.CANNOT
    assert "float64" in capsys.readouterr().err


def test_info_names_the_card_and_its_kernels(
    run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = run_json("info")
    assert payload["card"]["name"] == cli.find_card()[1]
    assert payload["card"]["arch"].startswith("sm_")
    assert payload["card"]["memory_bytes"] > 2**30
    assert payload["kernels"]["forward"].startswith("forward_")
    assert payload["kernels"]["backward"].startswith("backward_")
    assert cli.main(["info"]) == 0
    assert payload["kernels"]["forward"] in capsys.readouterr().out


def test_warmup_loads_what_a_call_needs(run_json: Any) -> None:
    payload = run_json("warmup", "--head-dims", "32", "--dtypes", "float16")
    assert payload["warmed"][0]["plans"]
    assert payload["cache"]["num_kernels"] > 0
