"""The sweep over a plan's candidates: compile all, check all, time the right ones together.

`sweep` knows neither shapes nor arrays: it gets candidates of ``catalogue.py``, a call and its
check. ``streamkl-cupy tune`` gives it CuPy arrays (`ArraySubject`), ``python -m bench tune`` its
cases. It never runs as part of a user's call.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from streamkl_cupy import api, catalogue, interop, jit, plan, timing
from streamkl_cupy.problem import INPUTS, Problem
from streamkl_cupy.state import KLState

Plan: TypeAlias = plan.ForwardPlan | plan.BackwardPlan
Kernel: TypeAlias = tuple[str, jit.Template]

# Who is slower than this in a single call is not timed any further.
HOPELESS = 2.0
# Who takes part in the rounds that decide, besides the plan's own.
FINALISTS = 6
SCREEN_ROUNDS, SCREEN_MS = 3, 5.0
# Of the time that there is.
COMPILE_SHARE, SCREEN_SHARE = 0.5, 0.6
# Tiles whose numbers of splits are tried, too.
SPLIT_TILES = 3
# What differs by less is as fast: the plan's own choice stays.
NOISE = 0.02
# Most that results of two candidates may differ, norm-relative; they round in different orders.
KL_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2e-2

HOLD_BYTES = 1 << 28
RANDOM_BLOCK = (1 << 21) - 9  # odd, so that heads do not repeat each other


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate and what became of it.

    Attributes
    ----------
    planned, choice
        What ran, and the choice that leads to it.
    status
        ``"ok"``; ``"slow"`` where it was left out of the rounds that decide; ``"wrong"``;
        ``"refused"`` where a kernel does not compile, spills or does not run; or ``"untried"``
        where there was no time left.
    detail
        Why it is not ok.
    timing
        Of the rounds that decide; None unless ok.
    """

    planned: Plan
    choice: plan.Choice
    status: str
    detail: str = ""
    timing: timing.Timing | None = None

    @property
    def text(self) -> str:
        """The kernels with their template arguments but for element, side and head dims."""
        words = []
        for kernel in self.planned.kernels:
            shown = [
                str(value).lower() if isinstance(value, bool) else str(value)
                for name, value in kernel.template
                if name not in ("Element", "kSide", "kHeadDim", "kHeadDim1", "kHeadDim2")
            ]
            if shown:
                words.append(f"{kernel.kernel}<{', '.join(shown)}>")
        splits = getattr(self.planned, "num_splits", 1)
        return " + ".join(words) + (f", {splits} splits" if splits > 1 else "")


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found.

    Attributes
    ----------
    own
        The plan's own choice.
    best
        The fastest.
    tried
        All of them: those that were timed from the fastest on, then the others.
    gain
        How many times as fast as the plan's own choice the best is, by the rounds' median.
    """

    own: Tried
    best: Tried
    tried: tuple[Tried, ...]
    gain: float

    @property
    def choice(self) -> plan.Choice:
        """What to keep: the plan's own unless another is faster by more than noise."""
        return self.best.choice if self.gain > 1 + NOISE else plan.NO_CHOICE


def sweep(
    candidates: Mapping[Any, plan.Choice],
    subject: Subject,
    stopwatch: timing.Stopwatch,
    *,
    refused: Mapping[Kernel, str],
    pause: Callable[[], None] = timing.rest,
    rounds: int = timing.ROUNDS,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Find the fastest of the candidates for one problem.

    Parameters
    ----------
    candidates
        What `catalogue.forward_candidates` or `catalogue.backward_candidates` returned.
    subject
        What is computed.
    stopwatch
        What times calls.
    refused
        Kernels that must not be chosen, and why: what `compile_kernels` returned.
    pause, rounds
        As `timing.measure` takes them.
    seconds, clock
        How long it may take, about, and what tells. Who is not reached in time is left out; the
        plan's own choice never is.
    say
        Told what is going on.

    Raises
    ------
    RuntimeError
        If the plan's own choice is wrong or does not run: then there is nothing to compare with.
    """
    deadline = clock() + seconds
    trial = _Trial(subject, stopwatch, refused, say)
    own_plan, own_choice = next(iter(candidates.items()))
    own = trial.admit(own_plan, own_choice)
    if own.status != "slow":
        raise RuntimeError(
            f"{own_plan.name}: expected the plan's own choice to be right, got {own.status}: "
            f"{own.detail}; run streamkl-cupy audit, and report it"
        )
    # Tiles first, each split as the plan would; then the splits of the best tiles.
    groups: dict[object, list[tuple[Plan, plan.Choice]]] = {}
    for chosen, choice in candidates.items():
        groups.setdefault(getattr(chosen, "tile", choice), []).append((chosen, choice))
    screening_ends = deadline - (1 - SCREEN_SHARE) * seconds if seconds < math.inf else math.inf

    def in_time() -> bool:
        return clock() < screening_ends

    times = trial.screen((group[0] for group in groups.values()), in_time)
    by_speed = sorted(
        (group for group in groups.values() if group[0][1] in times),
        key=lambda group: times[group[0][1]],
    )
    splits = (item for group in by_speed[:SPLIT_TILES] for item in group[1:])
    times |= trial.screen(splits, in_time)

    screened = sorted(times, key=times.__getitem__)
    finalists = [own_choice, *screened[:FINALISTS]]
    together = combined(screened)
    if together is not None and in_time():
        chosen = under(together, subject.planned)()
        if trial.admit(chosen, together).status == "slow":
            finalists.append(together)
    finalists = list(dict.fromkeys(finalists))
    say(f"timing {len(finalists)} of {len(candidates)}")
    timings = timing.measure(
        {str(place): under(one, subject.call) for place, one in enumerate(finalists)},
        stopwatch,
        rounds=rounds,
        budget_ms=max(0.0, deadline - clock()) * 1e3,
        pause=pause,
    )
    timed = [
        dataclasses.replace(trial.tried[one], status="ok", timing=each)
        for one, each in zip(finalists, timings.values(), strict=True)
    ]
    own = timed[0]
    timed.sort(key=lambda one: _timing(one).median_ms)
    others = [one for choice, one in trial.tried.items() if choice not in finalists]
    return Swept(own, timed[0], (*timed, *others), _timing(timed[0]).times_as_fast(_timing(own)))


class Subject(Protocol):
    """What a sweep computes, each time under the `plan.override` in force."""

    def planned(self) -> Plan:
        """Plan without computing."""

    def call(self) -> object:
        """Compute once."""

    def check(self) -> str:
        """Compute into outputs that were poisoned; what is wrong with them, empty if nothing."""


class _Trial:
    """Candidates that have been checked, and those that were right."""

    def __init__(
        self,
        subject: Subject,
        stopwatch: timing.Stopwatch,
        refused: Mapping[Kernel, str],
        say: Callable[[str], None],
    ) -> None:
        self.tried: dict[plan.Choice, Tried] = {}
        self._subject = subject
        self._stopwatch = stopwatch
        self._refused = refused
        self._say = say
        self._fastest_ms = math.inf

    def admit(self, chosen: Plan, choice: plan.Choice) -> Tried:
        """Check a candidate once; it counts as slow until it is timed."""
        if choice not in self.tried:
            self._say(f"checking {chosen.name}")
            self.tried[choice] = Tried(chosen, choice, *self._verdict(chosen, choice))
        return self.tried[choice]

    def _verdict(self, chosen: Plan, choice: plan.Choice) -> tuple[str, str]:
        for kernel in chosen.kernels:
            if reason := self._refused.get((kernel.kernel, kernel.template)):
                return "refused", f"{kernel.kernel}: {reason}"
        try:
            wrong = under(choice, self._subject.check)()
        except (RuntimeError, MemoryError) as error:
            return "refused", f"{type(error).__name__}: {error}".splitlines()[0]
        return ("wrong", wrong) if wrong else ("slow", "")

    def screen(
        self, items: Iterable[tuple[Plan, plan.Choice]], in_time: Callable[[], bool]
    ) -> dict[plan.Choice, float]:
        """Milliseconds of those that are right and not hopeless, roughly."""
        right = []
        for chosen, choice in items:
            if choice not in self.tried and not in_time():
                self.tried[choice] = Tried(chosen, choice, "untried")
            elif self.admit(chosen, choice).status == "slow":
                right.append(choice)
        calls = {one: under(one, self._subject.call) for one in right}
        once = {one: self._stopwatch(call, 1) for one, call in calls.items()}
        self._fastest_ms = min(self._fastest_ms, *once.values(), math.inf)
        hopeful = [one for one in right if once[one] <= HOPELESS * self._fastest_ms]
        timings = timing.measure(
            {str(place): calls[one] for place, one in enumerate(hopeful)},
            self._stopwatch,
            rounds=SCREEN_ROUNDS,
            round_ms=SCREEN_MS,
            pause=lambda: None,
        )
        return {one: each.median_ms for one, each in zip(hopeful, timings.values(), strict=True)}


def combined(order: Iterable[plan.Choice]) -> plan.Choice | None:
    """The tiles of separate kernels that were fastest each by itself, put together.

    Parameters
    ----------
    order
        Choices from the fastest on. Kernels of the generation of the first separate one count.

    Returns
    -------
    Choice or None
        None if there are not two kernels with tiles to put together.
    """
    separate = [one for one in order if one.strategy == "separate"]
    tiles: dict[str, Any] = {}
    for choice in separate:
        if choice.backward_kernel == separate[0].backward_kernel:
            for kernel, tile in choice.backward_tiles:
                tiles.setdefault(kernel, tile)
    if len(tiles) < 2:
        return None
    return dataclasses.replace(separate[0], backward_tiles=tuple(sorted(tiles.items())))


def kernels_of(plans: Iterable[Plan]) -> tuple[Kernel, ...]:
    """The kernels of plans, each once."""
    found = dict.fromkeys((one.kernel, one.template) for item in plans for one in item.kernels)
    return tuple(found)


def compile_kernels(
    kernels: Iterable[Kernel],
    arch: str,
    *,
    seconds: float = math.inf,
    on_step: Callable[[str], None] = lambda name: None,
) -> dict[Kernel, str]:
    """Compile kernels in processes of their own; they are found on disk from then on.

    Parameters
    ----------
    kernels
        Names and template arguments.
    arch
        Of the card.
    seconds
        How long it may take, about; what has not been begun by then is left out.
    on_step
        Told the name of each kernel that is ready.

    Returns
    -------
    dict
        Those that must not be chosen, and why: they do not compile, they spill registers, or there
        was no time left.
    """
    todo = tuple(kernels)
    deadline = time.monotonic() + seconds
    refused = {}
    for kernel, reason in _compiled(todo, arch, deadline):
        on_step(jit.render(*kernel))
        if reason:
            refused[kernel] = reason
    return refused


def compile_one(kernel: Kernel, arch: str) -> str:
    """Compile one; why it must not be chosen, empty if there is no reason."""
    try:
        built = jit.build(*kernel, arch)
    except jit.CompileError as error:
        return str(error).splitlines()[0]
    # No kernel keeps anything on the stack but registers that it spills.
    num_bytes = jit.stack_bytes(built.path.read_bytes())
    return f"{num_bytes} bytes of spilled registers" if num_bytes else ""


def _compiled(todo: tuple[Kernel, ...], arch: str, deadline: float) -> Iterator[tuple[Kernel, str]]:
    workers = min(len(todo), os.cpu_count() or 1)
    late = "there was no time left to compile it"
    if workers < 2:
        for kernel in todo:
            yield kernel, compile_one(kernel, arch) if time.monotonic() < deadline else late
        return
    # A fork would hand down a device that is in use.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(compile_one, kernel, arch): kernel for kernel in todo}
        try:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            for future in as_completed(tuple(waiting), left):
                yield waiting.pop(future), future.result()
        except TimeoutError:
            for future in waiting:
                future.cancel()
        # Those that were running are waited for.
        for future, kernel in waiting.items():
            yield kernel, late if future.cancelled() else future.result()


def under(choice: plan.Choice, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call under a choice."""
    fields = {
        field.name: value
        for field in dataclasses.fields(choice)
        if (value := getattr(choice, field.name)) != field.default
    }

    def bound() -> Any:
        with plan.override(**fields):
            return call()

    return bound


def _timing(tried: Tried) -> timing.Timing:
    assert tried.timing is not None
    return tried.timing


# --------------------------------------------------------------------------- a user's own shapes


@dataclass(frozen=True, slots=True)
class Task:
    """What a user tunes for: the arguments that decide a plan.

    Attributes
    ----------
    problem
        A contiguous problem, see `problem.contiguous`.
    wrt
        The gradients of one side; empty for the forward.
    deterministic
        Of the backward.
    """

    problem: Problem
    wrt: tuple[str, ...] = ()
    deterministic: bool = False

    def candidates(self, facts: plan.DeviceFacts) -> Mapping[Any, plan.Choice]:
        """The plan's candidates, its own choice first."""
        if self.wrt:
            return catalogue.backward_candidates(
                self.problem, facts, self.wrt, deterministic=self.deterministic
            )
        return catalogue.forward_candidates(self.problem, facts)

    def planned(self, facts: plan.DeviceFacts) -> Plan:
        """The plan under the override in force."""
        if self.wrt:
            return plan.backward(self.problem, facts, self.wrt, deterministic=self.deterministic)
        return plan.forward(self.problem, facts)

    def tuned(self, choice: plan.Choice) -> plan.TunedChoice:
        """The choice as plans look it up."""
        of = plan.problem_class(self.problem, self.wrt, self.deterministic)
        return plan.TunedChoice(of, plan.shape_of(self.problem), choice)


class CupyClock:
    """The clock of CuPy's current device and stream."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._block = cupy.empty(HOLD_BYTES, dtype=cupy.uint8)
        self._fill()
        start = self.record()
        for _ in range(8):
            self._fill()
        stop = self.record()
        self.synchronize()
        self._fill_ms = self.elapsed_ms(start, stop) / 8

    def record(self) -> Any:
        """An event at this place of the current stream."""
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two events that have passed."""
        return float(self._cupy.cuda.get_elapsed_time(start, stop))

    def synchronize(self) -> None:
        """Wait for the device."""
        self._cupy.cuda.get_current_stream().synchronize()

    def hold(self, milliseconds: float) -> None:
        """Keep the current stream busy for about so long: it fills memory meanwhile."""
        for _ in range(int(milliseconds / self._fill_ms) + 1):
            self._fill()

    def _fill(self) -> None:
        stream = self._cupy.cuda.get_current_stream().ptr
        self._cupy.cuda.runtime.memsetAsync(self._block.data.ptr, 0, HOLD_BYTES, stream)


class ArraySubject:
    """Random CuPy arrays for a task, and the call that is tuned on them.

    Nothing here but the calls computes on the card, so CuPy compiles nothing: random numbers come
    from the host, a block of them that is repeated, and results are compared on the host.
    """

    def __init__(self, task: Task, facts: plan.DeviceFacts) -> None:
        import cupy

        self._cupy = cupy
        self._task = task
        self._facts = facts
        problem = task.problem
        rng = np.random.default_rng(0)
        dtype = interop.numpy_dtype(problem.dtype)
        queries, keys = problem.num_queries, problem.num_keys
        rows = (problem.batch, problem.num_heads, queries)
        shapes = (
            (*rows, problem.head_dim1),
            (problem.batch, problem.num_key_heads1, keys, problem.head_dim1),
            (*rows, problem.head_dim2),
            (problem.batch, problem.num_key_heads2, keys, problem.head_dim2),
        )
        self._q1, self._k1, self._q2, self._k2 = (
            self._normal(rng, shape, dtype) for shape in shapes
        )
        self._dkl = self._normal(rng, rows, np.dtype(np.float32))
        self._state = KLState(*(cupy.empty(rows, np.float32) for _ in range(5)))
        by_name = dict(zip(INPUTS, shapes, strict=True))
        self._gradients = tuple(cupy.empty(by_name[name], dtype) for name in task.wrt)
        self._expected: list[Any] | None = None
        if task.wrt:
            self._forward()

    def _normal(self, rng: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = self._cupy.empty(shape, dtype)
        flat = array.reshape(-1)
        done = min(flat.size, RANDOM_BLOCK)
        flat[:done].set(rng.standard_normal(done, np.float32).astype(dtype))
        while done < flat.size:
            size = min(done, flat.size - done)
            flat[done:].data.copy_from_device(flat.data, size * dtype.itemsize)
            done += size
        return array

    def planned(self) -> Plan:
        """Plan without computing."""
        return self._task.planned(self._facts)

    def call(self) -> None:
        """Compute once."""
        if not self._task.wrt:
            self._forward()
            return
        api.attention_kl_backward(
            self._dkl,
            self._q1,
            self._k1,
            self._q2,
            self._k2,
            self._state,
            wrt=self._task.wrt,
            causal=self._task.problem.causal,
            deterministic=self._task.deterministic,
            out=self._gradients,
        )

    def _forward(self) -> None:
        api.attention_kl(
            self._q1,
            self._k1,
            self._q2,
            self._k2,
            causal=self._task.problem.causal,
            return_state=True,
            out=self._state,
        )

    def check(self) -> str:
        """Compute into poisoned arrays, and compare with what the first to be checked, the plan's
        own choice, has computed: every row of kl and lse, gradients on the first and last head."""
        state = self._state
        written = self._gradients or (state.kl, state.lse1, state.lse2)
        for array in written:
            array.data.memset(0xFF, array.nbytes)  # a NaN in each of the dtypes
        self.call()
        results = [self._shown(array) for array in written]
        if self._expected is None:
            self._expected = results
        tolerance = GRADIENT_TOLERANCE if self._gradients else KL_TOLERANCE
        errors = [difference(*pair) for pair in zip(results, self._expected, strict=True)]
        # A NaN is not below the tolerance either.
        if all(error < tolerance for error in errors):
            return ""
        return f"differs by {max(errors):.1e} from the plan's own"

    def _shown(self, array: Any) -> Any:
        heads = array.reshape(-1, *array.shape[2:])
        if not self._gradients:
            return heads.get().astype(np.float32)
        return np.stack([heads[0].get(), heads[-1].get()]).astype(np.float32)


def difference(ours: Any, expected: Any) -> float:
    """Norm of the difference over the norm; NaN if either has one.

    Both must be infinite in the same places: the lse of a row without keys is -inf.
    """
    same = ours == expected
    gap = np.where(same, 0.0, ours - np.where(same, 0.0, expected)).astype(np.float64)
    norm = np.linalg.norm(np.where(np.isfinite(expected), expected, 0.0).astype(np.float64))
    return float(np.linalg.norm(gap) / (norm or 1.0))


def share_of(deadline: float, count: int) -> float:
    """Seconds for the next of so many that follow each other until a deadline."""
    return max(0.0, deadline - time.monotonic()) / count


def compile_candidates(
    candidates: Iterable[Mapping[Any, plan.Choice]],
    arch: str,
    *,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> dict[Kernel, str]:
    """`compile_kernels` for the candidates of several problems, what the plan itself chooses
    first."""
    candidates = list(candidates)
    own = [next(iter(found)) for found in candidates]
    kernels = kernels_of([*own, *(made for found in candidates for made in found)])
    done = itertools.count(1)
    return compile_kernels(
        kernels,
        arch,
        seconds=seconds,
        on_step=lambda kernel: say(f"compiled {next(done)} of {len(kernels)} kernels"),
    )


def tune(
    tasks: Mapping[str, Task],
    facts: plan.DeviceFacts,
    *,
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Swept]:
    """Sweep tasks on the current card, one after the other; keeps nothing on disk but kernels.

    Parameters
    ----------
    tasks
        By name.
    facts
        Of the card.
    seconds
        How long it may take, about.
    say
        Told what is going on.

    Returns
    -------
    dict
        What was found, by the same names.
    """
    deadline = time.monotonic() + seconds
    candidates = {name: task.candidates(facts) for name, task in tasks.items()}
    refused = compile_candidates(
        candidates.values(), facts.arch, seconds=COMPILE_SHARE * seconds, say=say
    )
    stopwatch = timing.EventStopwatch(CupyClock())
    swept = {}
    for index, (name, task) in enumerate(tasks.items()):
        say(f"{name}: making inputs")
        subject = ArraySubject(task, facts)
        swept[name] = sweep(
            candidates[name],
            subject,
            stopwatch,
            refused=refused,
            seconds=share_of(deadline, len(tasks) - index),
            say=lambda text, name=name: say(f"{name}: {text}"),  # type: ignore[misc]
        )
        del subject
    return swept
