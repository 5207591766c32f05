"""The sweep over a plan's candidates, by a stopwatch that only counts; and timing by turns."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import catalogue, jit, plan, tiling, timing, tune
from streamkl_cupy.problem import contiguous
from tests.compile_all import missing_compiler

MISSING = missing_compiler()
H200 = plan.device_facts("sm_90a")


def task(**changes: Any) -> tune.Task:
    of = {name: changes.pop(name) for name in ("wrt", "deterministic") if name in changes}
    sizes: dict[str, Any] = {
        "batch": 1,
        "num_heads": 4,
        "num_key_heads1": 4,
        "num_key_heads2": 4,
        "num_queries": 512,
        "num_keys": 8192,
        "head_dim1": 128,
        "head_dim2": 128,
        "causal": False,
    }
    return tune.Task(contiguous("bfloat16", **sizes | changes), **of)


class FakeSubject:
    """Computes nothing; what a call would take is a function of the plan in force."""

    def __init__(self, of: tune.Task, wrong: Callable[[tune.Plan], str] = lambda made: "") -> None:
        self._task = of
        self._wrong = wrong
        self.checked: list[str] = []

    def planned(self) -> tune.Plan:
        return self._task.planned(H200)

    def call(self) -> tune.Plan:
        return self.planned()

    def check(self) -> str:
        self.checked.append(self.planned().name)
        return self._wrong(self.planned())


def sweep(
    of: tune.Task,
    each_ms: Callable[[tune.Plan], float],
    wrong: Callable[[tune.Plan], str] = lambda made: "",
    refused: dict[tune.Kernel, str] | None = None,
) -> tuple[tune.Swept, FakeSubject]:
    subject = FakeSubject(of, wrong)
    candidates = of.candidates(H200)
    swept = tune.sweep(
        candidates,
        subject,
        lambda call, count: each_ms(call()) * count,
        refused=refused or {},
        pause=lambda: None,
        rounds=3,
    )
    return swept, subject


# ----------------------------------------------------------------------------------------- sweep


def test_the_fastest_tile_and_number_of_splits_are_found() -> None:
    wanted = tiling.WarpgroupTile(2, 96, 3, False)

    def each_ms(made: Any) -> float:
        return 1.0 + 0.1 * (made.tile != wanted) + 0.01 * abs(made.num_splits - 16)

    of = task()
    assert wanted in {made.tile for made in of.candidates(H200)}
    swept, _ = sweep(of, each_ms)
    assert swept.best.planned.tile == wanted
    assert swept.best.planned.num_splits == 16
    assert swept.own.planned == of.planned(H200)
    assert swept.gain == pytest.approx(each_ms(swept.own.planned) / 1.0)
    assert swept.choice == swept.best.choice
    times = [one.timing.median_ms for one in swept.tried if one.timing]
    assert times == sorted(times)
    assert len(times) <= tune.FINALISTS + 1
    entry = of.tuned(swept.choice)
    assert entry.problem_class == plan.problem_class(of.problem)
    assert swept.best.text.startswith("forward_sm90<2, 96, 3, false")
    assert swept.best.text.endswith(", 16 splits")


def test_the_plans_own_choice_stays_where_nothing_is_faster() -> None:
    swept, _ = sweep(task(), lambda made: 1.0)
    assert swept.choice == plan.NO_CHOICE
    own = swept.own.planned
    swept, _ = sweep(task(), lambda made: 1.0 + 0.5 * tune.NOISE * (made == own))
    assert 1 < swept.gain < 1 + tune.NOISE
    assert swept.choice == plan.NO_CHOICE


def test_what_was_tuned_before_does_not_pass_for_the_plans_own() -> None:
    of = task()
    slow = list(of.candidates(H200).items())[-1]
    card = plan.DeviceFacts("sm_90a", 132, 232_448, tuned=(of.tuned(slow[1]),))
    assert of.planned(card) == slow[0]
    own = next(iter(of.candidates(card).items()))
    assert own[0] == of.planned(H200)
    assert tune.under(own[1], lambda: of.planned(card))() == own[0]


def test_a_wrong_candidate_is_never_chosen() -> None:
    own = task().planned(H200)
    swept, _ = sweep(
        task(), lambda made: 1.0 if made == own else 0.5, wrong=lambda made: "off" * (made != own)
    )
    assert swept.choice == plan.NO_CHOICE
    assert {one.status for one in swept.tried} == {"ok", "wrong"}
    assert [one for one in swept.tried if one.status == "ok"] == [swept.own]


def test_a_kernel_that_does_not_run_is_left_out() -> None:
    own = task().planned(H200)

    def fail(made: tune.Plan) -> str:
        if made != own:
            raise RuntimeError("too many resources\nrequested")
        return ""

    swept, _ = sweep(task(), lambda made: 1.0, wrong=fail)
    refused = [one for one in swept.tried if one.status == "refused"]
    assert len(refused) > 5
    assert {one.detail for one in refused} == {"RuntimeError: too many resources"}


def test_a_kernel_that_spills_is_not_even_run() -> None:
    of = task()
    own = of.planned(H200)
    spilling = {
        (kernel.kernel, kernel.template): "8 bytes of spills"
        for made in of.candidates(H200)
        if made.kernels[0] != own.kernels[0]
        for kernel in made.kernels[:1]
        if kernel.template != own.kernels[0].template
    }
    swept, subject = sweep(of, lambda made: 1.0, refused=spilling)
    assert {one.detail for one in swept.tried if one.status == "refused"} == {
        f"{kernel}: 8 bytes of spills" for kernel, _ in spilling
    }
    assert all(name.startswith(own.name.split("_split")[0]) for name in subject.checked)


def test_without_a_right_choice_of_the_plan_there_is_no_sweep() -> None:
    with pytest.raises(RuntimeError, match=r"expected the plan's own choice .* got wrong: off"):
        sweep(task(), lambda made: 1.0, wrong=lambda made: "off")


def test_the_best_tiles_of_separate_kernels_are_put_together() -> None:
    of = task(wrt=("q2", "k2"), deterministic=True)
    tile = tiling.BackwardTile(1, 8, 32, 32, 2)

    def each_ms(made: Any) -> float:
        side = made.sides[0]
        if side.fused is not None:
            return 4.0
        return 3.0 - sum(kernel.block == tile.threads for kernel in (side.dq, side.dk)) / 2

    swept, subject = sweep(of, each_ms)
    tiles = dict(swept.choice.backward_tiles)
    assert set(tiles) == {"backward_dq_sm80", "backward_dk_sm80"}
    assert {one.threads for one in tiles.values()} == {tile.threads}
    assert len(subject.checked) == len(set(map(str, swept.tried)))
    assert swept.best.text.count("backward_d") == 2


def test_only_tiles_of_one_generation_are_put_together() -> None:
    narrow, wide = tiling.BackwardTile(1, 2, 16, 16, 2), tiling.BackwardTile(1, 8, 32, 32, 2)

    def separate(kernel: str, tile: tiling.BackwardTile, generation: str | None) -> plan.Choice:
        return plan.Choice(
            strategy="separate", backward_kernel=generation, backward_tiles=((kernel, tile),)
        )

    best = separate("backward_dk_sm80", wide, plan.PORTABLE)
    other = separate("backward_dq_sm90", narrow, None)
    second = separate("backward_dq_sm80", narrow, plan.PORTABLE)
    late = separate("backward_dk_sm80", narrow, plan.PORTABLE)
    together = tune.combined([plan.Choice(strategy="fused"), best, other, second, late])
    assert together is not None
    assert dict(together.backward_tiles) == {"backward_dk_sm80": wide, "backward_dq_sm80": narrow}
    assert together.backward_kernel == plan.PORTABLE
    assert tune.combined([best, other, late]) is None


def test_time_that_runs_out_leaves_the_plans_own() -> None:
    of = task()
    ticks = itertools.count()

    def run(seconds: float) -> tune.Swept:
        # A second for each look at the clock.
        return tune.sweep(
            of.candidates(H200),
            FakeSubject(of),
            lambda call, count: count * 1.0,
            refused={},
            pause=lambda: None,
            seconds=seconds,
            clock=lambda: float(next(ticks)),
        )

    nothing = run(0.0)
    assert nothing.best == nothing.own
    assert nothing.choice == plan.NO_CHOICE
    assert {one.status for one in nothing.tried if one != nothing.own} == {"untried"}
    some = run(20.0)
    statuses = Counter(one.status for one in some.tried)
    assert statuses["untried"] > 0
    assert statuses["ok"] > 1
    assert "untried" not in {one.status for one in run(1e9).tried}


def test_each_has_a_share_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.time, "monotonic", lambda: 100.0)
    assert tune.share_of(160.0, 3) == 20.0
    assert tune.share_of(90.0, 3) == 0.0


def test_slow_candidates_are_not_timed_for_long() -> None:
    asked: Counter[tune.Plan] = Counter()
    own = task().planned(H200)

    def each_ms(made: Any) -> float:
        asked[made] += 1
        return 1.0 if made == own else 1e3

    sweep(task(), each_ms)
    assert asked.pop(own) > 3
    assert set(asked.values()) == {1}


# --------------------------------------------------------------------------------------- compiling


def test_kernels_that_must_not_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(kernel: str, template: jit.Template, arch: str) -> jit.Built:
        if kernel == "broken":
            raise jit.CompileError(kernel, arch, "nvrtc", "error: no")
        path = tmp_path / kernel
        path.write_text(kernel)
        return jit.Built(path, kernel, "")

    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(jit, "stack_bytes", {b"fine": 0, b"spills": 24}.__getitem__)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 1)
    seen: list[str] = []
    kernels = [("fine", ()), ("spills", ()), ("broken", ())]
    refused = tune.compile_kernels(kernels, "sm_90a", on_step=seen.append)
    assert seen == ["fine", "spills", "broken"]
    assert set(refused) == set(kernels[1:])
    assert refused["spills", ()] == "24 bytes of spilled registers"
    assert "could not compile" in refused["broken", ()]


def small_kernels() -> list[tune.Kernel]:
    small = ("reduce_splits", "backward_prepare", "backward_finish")
    return [kernel for kernel in catalogue.specialisations("sm_90a") if kernel[0] in small][:5]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_processes_have_not_begun_in_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "cache"))
    kernels = small_kernels()
    refused = tune.compile_kernels(kernels, "sm_90a", seconds=0.0)
    assert set(refused.values()) == {"there was no time left to compile it"}
    assert jit.cache_info().num_kernels == len(kernels) - len(refused)


def test_one_process_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 1)
    refused = tune.compile_kernels(small_kernels(), "sm_90a", seconds=-1.0)
    assert set(refused) == set(small_kernels())


def test_the_plans_own_kernels_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tune.Kernel] = []

    def compile_kernels(kernels: Any, arch: str, **options: Any) -> dict[tune.Kernel, str]:
        asked.extend(kernels)
        return {}

    monkeypatch.setattr(tune, "compile_kernels", compile_kernels)
    tasks = [task(), task(head_dim1=64)]
    tune.compile_candidates([one.candidates(H200) for one in tasks], "sm_90a")
    own = tune.kernels_of(one.planned(H200) for one in tasks)
    assert tuple(asked[: len(own)]) == own
    assert len(set(asked)) == len(asked) > len(own)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_processes_compile_what_is_found_on_disk_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(tmp_path / "cache"))
    kernels = small_kernels()[:2]
    assert tune.compile_kernels(kernels, "sm_90a") == {}
    assert jit.cache_info().num_kernels == 2


# --------------------------------------------------------------------------------------- comparing


def test_differences() -> None:
    nan, inf = np.nan, np.inf
    row = np.array([3.0, 4.0], np.float32)
    assert tune.difference(row, row) == 0
    assert tune.difference(row + np.float32(1), row) == pytest.approx(2**0.5 / 5)
    assert tune.difference(np.array([-inf, 1.0]), np.array([-inf, 1.0])) == 0
    for ours, expected in (([nan, 1], [0, 1]), ([-inf, 1], [0, 1]), ([0, 1], [-inf, 1])):
        assert not tune.difference(np.array(ours, float), np.array(expected, float)) < 1e-2
    assert tune.difference(np.array([0.5]), np.array([0.0])) == 0.5


# ------------------------------------------------------------------------------------------ turns


@pytest.mark.parametrize("count", range(1, 9))
def test_everybody_stands_everywhere_and_follows_everybody(count: int) -> None:
    cycle = count if count % 2 == 0 else 2 * count
    rounds = [timing.order(count, index) for index in range(cycle)]
    assert all(sorted(row) == list(range(count)) for row in rounds)
    for place in range(count):
        assert Counter(row[place] for row in rounds[:count]) == Counter(range(count))
    after = Counter(pair for row in rounds for pair in itertools.pairwise(row))
    if count > 1:
        assert set(after) == {(a, b) for a in range(count) for b in range(count) if a != b}
        assert len(set(after.values())) == 1


def test_a_turn_follows_a_pause_whoever_had_the_one_before() -> None:
    log: list[str] = []

    def watch(call: timing.Call, count: int) -> float:
        call()
        return 7.0 * count

    calls = {name: (lambda name=name: log.append(name)) for name in "abc"}
    timing.measure(calls, watch, rounds=2, pause=lambda: log.append("-"))
    turns = log[log.index("-") :]
    assert turns[::2] == ["-"] * 9
    assert turns[1::2] == list("abcabcbca"), "a round that does not count, and two that do"


def test_a_budget_shortens_long_measurements() -> None:
    for budget_ms, expected in ((1e9, 8), (500.0, 5), (1.0, timing.LEAST_ROUNDS)):
        found = timing.measure(
            {"a": lambda: None},
            lambda call, count: 100.0 * count,
            budget_ms=budget_ms,
            pause=lambda: None,
        )
        assert len(found["a"].rounds_ms) == expected


def test_ratios_are_taken_within_rounds() -> None:
    warm, cold = timing.Timing((1.0, 1.0, 4.0), 1), timing.Timing((2.0, 2.0, 8.0), 1)
    assert warm.times_as_fast(cold) == 2.0
    odd = timing.Timing((8.0, 2.0, 2.0), 1)
    assert warm.times_as_fast(odd) == 2.0
    assert (odd.median_ms, odd.min_ms, odd.spread) == (2.0, 2.0, 3.0)


class FakeClock:
    """A device that is slower or faster than the host."""

    def __init__(self, device_ms: float) -> None:
        self.device_ms = device_ms
        self.held: list[float] = []
        self.events = 0

    def record(self) -> int:
        self.events += 1
        return self.events

    def elapsed_ms(self, start: int, stop: int) -> float:
        return self.device_ms * (stop - start)

    def synchronize(self) -> None:
        pass

    def hold(self, milliseconds: float) -> None:
        self.held.append(milliseconds)


def test_a_device_that_outruns_the_host_is_held_back() -> None:
    slow, fast = FakeClock(1e3), FakeClock(1e-6)
    for clock in (slow, fast):
        assert timing.EventStopwatch(clock)(lambda: None, 3) == clock.device_ms
    assert slow.held == []
    assert len(fast.held) == 1


def test_what_comes_before_a_call_is_not_timed() -> None:
    clock, log = FakeClock(10.0), []
    watch = timing.EventStopwatch(clock, before=lambda: log.append("flush"))
    assert watch(lambda: log.append("call"), 2) == 20.0
    assert log == ["flush", "call"] * 2
