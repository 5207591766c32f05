"""The file of tuned choices: what is kept comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest

from streamkl_cupy import catalogue, choices, jit, plan, tiling
from streamkl_cupy.problem import Problem, contiguous

CARD = "NVIDIA H200"
H200 = plan.device_facts("sm_90a")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(directory))
    return directory


def make(**changes: Any) -> Problem:
    sizes: dict[str, Any] = {
        "batch": 2,
        "num_heads": 8,
        "num_key_heads1": 8,
        "num_key_heads2": 2,
        "num_queries": 1000,
        "num_keys": 4000,
        "head_dim1": 128,
        "head_dim2": 64,
        "causal": True,
    }
    return contiguous("bfloat16", **sizes | changes)


def forward_choice(problem: Problem) -> plan.TunedChoice:
    candidates = catalogue.forward_candidates(problem, H200)
    own, *others = candidates
    choice = next(candidates[made] for made in others if made.num_splits > own.num_splits)
    return plan.TunedChoice(plan.problem_class(problem), plan.shape_of(problem), choice)


def backward_choice(problem: Problem, tile: tiling.BackwardTile | None = None) -> plan.TunedChoice:
    tile = tile or catalogue.tile_candidates("backward_dk_sm80", problem, H200, 2)[-1]
    choice = plan.Choice(strategy="separate", backward_tiles=(("backward_dk_sm80", tile),))
    of = plan.problem_class(problem, ("q2", "k2"), True)
    return plan.TunedChoice(of, plan.shape_of(problem), choice)


@pytest.fixture
def stored() -> Path:
    return choices.store(CARD, H200, [forward_choice(make()), backward_choice(make())])


def spoil(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ignored(match: str, facts: plan.DeviceFacts = H200, card: str = CARD) -> None:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert choices.load(card, facts) == ()
    assert len(caught) == 1
    assert "STREAMKL_CHOICES=0" in str(caught[0].message)


@pytest.fixture
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_without_a_file_there_is_nothing(quiet: None, cache: Path) -> None:
    assert choices.load(CARD, H200) == ()
    assert not cache.exists()


def test_what_is_kept_comes_back(quiet: None, stored: Path, cache: Path) -> None:
    assert stored == cache / "choices-nvidia_h200-sm_90a.json"
    assert choices.load(CARD, H200) == (forward_choice(make()), backward_choice(make()))
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert list(cache.iterdir()) == [stored], "no unfinished file stays"


def test_plans_go_by_it(stored: Path) -> None:
    card = dataclasses.replace(H200, tuned=choices.load(CARD, H200))
    assert plan.forward(make(), card).num_splits == forward_choice(make()).choice.num_splits
    assert plan.forward(make(), card) != plan.forward(make(), H200)


def test_a_shape_is_replaced_and_others_stay(stored: Path) -> None:
    longer = make(num_queries=5000)
    choices.store(CARD, H200, [forward_choice(longer)])
    found = choices.load(CARD, H200)
    assert [one.shape[1] for one in found] == [5000, 1000, 1000]
    again = plan.TunedChoice(found[1].problem_class, found[1].shape, plan.NO_CHOICE)
    choices.store(CARD, H200, [again])
    assert choices.load(CARD, H200) == (found[0], found[2])


def test_clearing_the_cache_leaves_it(stored: Path) -> None:
    assert jit.cache_clear() == 0
    assert choices.load(CARD, H200)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sources": "0" * 64}, "measured with sources 0000"),
        ({"version": "0.0.1"}, r"measured with version 0\.0\.1, and here it is"),
        ({"format": 0}, "measured with format 0"),
        ({"card": "NVIDIA A100"}, "measured with card NVIDIA A100"),
        ({"arch": "sm_80"}, "measured with arch sm_80"),
        ({"entries": None}, "damaged"),
        ({"entries": [{}]}, r"damaged \(KeyError"),
    ],
)
def test_a_stale_or_foreign_file_is_ignored(stored: Path, changes: Any, match: str) -> None:
    spoil(stored, **changes)
    ignored(match)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"7", b'"x"'])
def test_a_damaged_file_is_ignored(stored: Path, content: bytes) -> None:
    stored.write_bytes(content)
    ignored("damaged")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("choice", "num_splits"), 0),
        (("choice", "num_splits"), 10**9),
        (("choice", "num_splits"), "many"),
        (("choice", "forward_kernel"), "forward_sm70"),
        (("choice", "forward_tile"), {"num_consumers": 9}),
        (("choice", "forward_tile"), None),
        (("choice", "strategy"), "quick"),
        (("choice", "backward_kernel"), "backward_dq_sm70"),
        (("choice", "backward_tiles"), [["backward_dk_sm80", {"row_tiles": 1}]]),
        (("shape",), [16, 1000]),
        (("shape",), [16, 100_000, 4000]),
        (("problem_class", "dtype"), "float64"),
        (("problem_class", "head_dim1"), 100),
        (("problem_class", "group1"), 0),
        (("problem_class", "wrt"), ["x"]),
        (("problem_class", "colour"), "red"),
    ],
)
def test_what_is_no_candidate_is_ignored(
    stored: Path, place: tuple[str, ...], value: object
) -> None:
    content = json.loads(stored.read_text())
    target = content["entries"][0]
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    stored.write_text(json.dumps(content))
    ignored("damaged")


def test_a_tile_that_does_not_fit_the_card_is_ignored(stored: Path) -> None:
    ignored("has no tile", dataclasses.replace(H200, shared_memory_per_block=10_000))


def test_it_can_be_turned_off(stored: Path, quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.write_bytes(b"{")
    monkeypatch.setenv("STREAMKL_CHOICES", "0")
    assert choices.load(CARD, H200) == ()
    assert choices.read(CARD, H200).path is None
    with pytest.raises(ValueError, match="STREAMKL_CHOICES: expected a place"):
        choices.store(CARD, H200, [])


def test_it_can_lie_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, quiet: None
) -> None:
    path = tmp_path / "mine.json"
    monkeypatch.setenv("STREAMKL_CHOICES", str(path))
    assert choices.read(CARD, H200) == choices.Contents(path)
    assert choices.store(CARD, H200, [forward_choice(make())]) == path
    assert choices.load(CARD, H200) == (forward_choice(make()),)
    assert not cache.exists()


def test_a_directory_of_others_is_not_read(stored: Path, cache: Path) -> None:
    cache.chmod(0o777)
    ignored("expected mode 700")
    with pytest.raises(jit.CacheError):
        choices.store(CARD, H200, [forward_choice(make())])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_ignored(stored: Path) -> None:
    stored.chmod(0)
    ignored("Permission denied")


def test_a_problem_of_a_class_is_of_that_class() -> None:
    for one in (forward_choice(make()), backward_choice(make())):
        of = one.problem_class
        problem = choices.problem_of(one)
        assert plan.problem_class(problem, of.wrt, of.deterministic) == of
        assert plan.shape_of(problem) == one.shape
