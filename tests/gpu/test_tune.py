"""Tuning on a card: the sweep runs and keeps only what is right; later calls go by what is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cupy
import pytest

from streamkl_cupy import api, audit, catalogue, choices, cli, launch, plan
from streamkl_cupy.problem import Problem, contiguous

SIZES: dict[str, Any] = {
    "batch": 1,
    "num_heads": 3,
    "num_key_heads1": 3,
    "num_key_heads2": 3,
    "num_queries": 200,
    "num_keys": 1500,
    "head_dim1": 64,
    "head_dim2": 64,
}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "choices.json"
    monkeypatch.setenv("STREAMKL_CHOICES", str(path))
    forget()
    yield path
    monkeypatch.delenv("STREAMKL_CHOICES")
    forget()


def forget() -> None:
    """What plans of this process remember of the card."""
    launch.device_facts.cache_clear()
    for remembered in vars(api).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sweep_finds_nothing_wrong(
    capsys: pytest.CaptureFixture[str], kept: Path, deterministic: bool
) -> None:
    words = ["--num-heads", "3", "--num-queries", "200", "--num-keys", "1500", "--head-dim1", "64"]
    words += ["--deterministic"] if deterministic else []
    assert cli.main(["tune", *words, "--json"]) == cli.OK
    payload = json.loads(capsys.readouterr().out)
    assert [task["task"] for task in payload["tasks"]] == ["forward", "gradients of q2 k2"]
    for task in payload["tasks"]:
        statuses = {one["status"] for one in task["tried"]}
        assert "ok" in statuses
        assert "wrong" not in statuses
        assert task["gain"] > 0
    assert payload["file"] == str(kept)
    assert cli.main(["info", "--json"]) == cli.OK
    info = json.loads(capsys.readouterr().out)["tuned"]
    assert info["file"] == str(kept)
    assert info["ignored"] is None
    assert len(info["shapes"]) == sum(task["kept"] for task in payload["tasks"])


def test_calls_go_by_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    facts = launch.device_facts(cupy.cuda.Device().id)
    problem: Problem = contiguous("bfloat16", **SIZES, causal=True)
    candidates = catalogue.forward_candidates(problem, facts)
    made = next(one for one in list(candidates)[1:] if one.num_splits > 1)
    gradients = catalogue.backward_candidates(problem, facts, ("q2", "k2"))
    cut = list(gradients)[-1]
    shape = plan.shape_of(problem)
    card = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    choices.store(
        card,
        facts,
        [
            plan.TunedChoice(plan.problem_class(problem), shape, candidates[made]),
            plan.TunedChoice(plan.problem_class(problem, ("q2", "k2")), shape, gradients[cut]),
        ],
    )
    forget()
    tuned = launch.device_facts(cupy.cuda.Device().id)
    assert dataclasses.replace(tuned, tuned=()) == facts
    assert plan.forward(problem, tuned) == made != plan.forward(problem, facts)
    assert plan.backward(problem, tuned, ("q2", "k2")) == cut
    arrays = audit.random_problem(**SIZES, dtype="bfloat16", seed=1)
    report = audit.measure(
        *(arrays[name] for name in (*audit.INPUTS, "dkl")),
        causal=True,
        wrt=("q2", "k2"),
        cupy=cupy,
    )
    assert report.passes
