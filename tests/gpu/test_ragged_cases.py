"""The cases of tests/cases.py once more, packed and padded, and what else a state may hold.

Each draw of a case is a sequence of a packed batch or an entry of a padded one, and all around it
is NaN; what is expected is that of each alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamkl_cupy as skl
from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.cases import Arrays, Case, enough_draws, plain, select
from tests.compare import assert_accurate
from tests.gpu.card import Cupy, Expected, Torch, random_inputs, same_bits
from tests.gpu.ragged import ExpectedParts, Part, run_ragged, unpacked, upload_ragged
from tests.gpu.test_entropy import textbook as textbook_entropies
from tests.gpu.test_normalisers import GIVEN, ExpectedGiven, outside

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MARGIN = 7  # rows of nobody before the first and behind the last
LENGTHS = (1, 2, 17, 127, 129, 400)
# The rest is about layouts, or about lengths, which all are in one batch below; and a batch of
# nothing has no sequences.
NAMED = [
    case
    for case in select()
    if case.group not in ("lengths", "layout") and not re.search("no_batch|nothing", case.name)
]
# Where float16 has less room than bfloat16.
NARROW = select("student_underflow", "big_logits", "scale", "offset", "no_mass", "upstream")


class Batch(NamedTuple):
    """Inputs as ``(B, H, N, ...)``, NaN where nobody is; whose is what; and how it is told."""

    inputs: Arrays
    parts: list[Part]
    lengths: dict[str, Sequence[int]]


def packed(entries: Sequence[Arrays]) -> Batch:
    """One behind the other."""
    q_ends, k_ends, parts = [MARGIN], [MARGIN], []
    for entry in entries:
        q_ends.append(q_ends[-1] + entry["q1"].shape[1])
        k_ends.append(k_ends[-1] + entry["k1"].shape[1])
        rows, keys = (slice(*ends[-2:]) for ends in (q_ends, k_ends))
        parts.append(Part(0, rows, keys))
    lengths = {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends}
    num_rows = {"q": q_ends[-1] + MARGIN, "k": k_ends[-1] + MARGIN}
    return Batch(_placed(entries, parts, 1, num_rows), parts, lengths)


def padded(entries: Sequence[Arrays]) -> Batch:
    """Side by side: keys with padding on both sides, of another width in each, queries on the
    right."""
    q_lens = [entry["q1"].shape[1] for entry in entries]
    kv_lens = [entry["k1"].shape[1] for entry in entries]
    kv_starts = [MARGIN * (idx % 5) for idx in range(len(entries))]
    spans = zip(q_lens, kv_starts, kv_lens, strict=True)
    parts = [
        Part(idx, slice(0, rows), slice(start, start + keys))
        for idx, (rows, start, keys) in enumerate(spans)
    ]
    lengths = {"kv_starts": kv_starts, "kv_lens": kv_lens, "q_lens": q_lens}
    num_rows = {"q": max(q_lens) + MARGIN, "k": max(kv_lens) + 5 * MARGIN}
    return Batch(_placed(entries, parts, len(entries), num_rows), parts, lengths)


def _placed(
    entries: Sequence[Arrays], parts: Sequence[Part], batch: int, num_rows: Mapping[str, int]
) -> Arrays:
    placed = {}
    for name, x in entries[0].items():
        length = num_rows["k" if name in ("k1", "k2") else "q"]
        placed[name] = np.full((batch, x.shape[0], length, *x.shape[2:]), np.nan, x.dtype)
        for entry, part in zip(entries, parts, strict=True):
            placed[name][part.of(name)] = entry[name][None]
    return placed


KINDS: dict[str, Callable[[Sequence[Arrays]], Batch]] = {"packed": packed, "padded": padded}


def entries_of(inputs: Arrays) -> list[Arrays]:
    """The entries of a batch, each without it."""
    return [{n: x[idx] for n, x in inputs.items()} for idx in range(len(inputs["q1"]))]


def check_case(case: Case, dtype: str, kind: str, library: Cupy, rng: np.random.Generator) -> None:
    drawn = enough_draws(case, rng, dtype)
    entries = entries_of(drawn)
    if len(entries) == 1:
        entries += entries_of(case.inputs(rng, dtype))
    batch = KINDS[kind](entries)
    has_offset = case.group in ("offset", "big_logits")
    expected = ExpectedParts(batch.inputs, batch.parts, case.options, has_offset=has_offset)
    for strategy in ("fused", "separate"):
        expected.check(
            run_ragged(library, batch.inputs, case.options, batch.lengths, strategy=strategy)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", NAMED, ids=str)
def test_every_output(case: Case, kind: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    check_case(case, "bfloat16", kind, cupy_library, rng)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_every_output_in_float16(
    case: Case, kind: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    check_case(case, "float16", kind, cupy_library, rng)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_odd_lengths(
    causal: bool, dtype: str, kind: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    sizes = itertools.product(LENGTHS, LENGTHS)
    builds = (plain(num_queries=rows, num_keys=keys) for rows, keys in sizes)
    drawn = (Case("lengths", "lengths", build).inputs(rng, dtype) for build in builds)
    batch = KINDS[kind]([entry for inputs in drawn for entry in entries_of(inputs)])
    options = {"causal": causal}
    expected = ExpectedParts(batch.inputs, batch.parts, options)
    for strategy in ("fused", "separate"):
        expected.check(
            run_ragged(cupy_library, batch.inputs, options, batch.lengths, strategy=strategy)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equal_sides_have_a_kl_of_exactly_zero(
    causal: bool, kind: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    shapes = ({"num_queries": 200, "num_keys": 150}, {"num_queries": 3, "num_keys": 900})
    entries = []
    for shape in shapes:
        inputs = Case("equal", "equal", plain(**shape)).inputs(rng, "bfloat16")
        entries += entries_of(inputs | {"q2": inputs["q1"], "k2": inputs["k1"]})
    batch = KINDS[kind](entries)
    options = {"causal": causal}
    results = run_ragged(cupy_library, batch.inputs, options, batch.lengths, wrt=())
    assert (results["kl"] == 0).all()
    np.testing.assert_array_equal(results["lse1"], results["lse2"])


def batch_of_three(
    rng: np.random.Generator, kind: str, dtype: str = "bfloat16", *, turn: int = 0
) -> Batch:
    """Under a causal mask some queries of one see no key, and none of the next one does; each
    turn begins with another."""
    shapes = ({"num_queries": 210, "num_keys": 190}, {"num_keys": 0}, {"num_keys": 333})
    entries = []
    for shape in (*shapes[turn:], *shapes[:turn]):
        of = {"heads": 4, "key_heads1": 2, "num_queries": 100, "head_dim2": 32, **shape}
        entries += entries_of(Case("one", "one", plain(**of)).inputs(rng, dtype))
    return KINDS[kind](entries)


def results_of(
    library: Cupy,
    batch: Batch,
    options: Mapping[str, Any],
    rows: Sequence[str],
    *,
    rows_given: Mapping[str, np.ndarray] | None = None,
    wrt: Sequence[str] = (),
    return_entropy: bool = False,
    **choices: Any,
) -> dict[str, np.ndarray]:
    """The named rows of a state, and gradients, as ``(B, H, N, ...)``."""
    arrays, on_card = upload_ragged(library, batch.inputs | dict(rows_given or {}), batch.lengths)
    qk, kept = [arrays[name] for name in INPUTS], {**options, **on_card}
    lse = {name: arrays[name] for name in rows_given or {}}
    asked = "return_entropy" if return_entropy else "return_state"
    state = skl.attention_kl(*qk, **kept, **lse, **{asked: True})
    found = {name: getattr(state, name) for name in rows}
    if wrt:
        gradients = skl.attention_kl_backward(
            arrays["dkl"], *qk, state, wrt=tuple(wrt), **kept, **choices
        )
        found |= zip(["d" + name for name in wrt], gradients, strict=True)
    return unpacked({name: library.get(x) for name, x in found.items()}, batch.lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (90, 20), "scale1": 0.2}], ids=str
)
def test_given_log_sum_exps(
    options: dict[str, Any],
    given: tuple[str, ...],
    kind: str,
    rng: np.random.Generator,
    cupy_library: Cupy,
) -> None:
    batch = batch_of_three(rng, kind)
    rows = {name: np.full(batch.inputs["dkl"].shape, np.nan, np.float32) for name in given}
    for part in batch.parts:
        alone = {name: x[part.of(name)] for name, x in batch.inputs.items()}
        for name, x in outside(rng, alone, options, given, 0.5).items():
            rows[name][part.of(name)] = x

    def expected_of(
        cut: Mapping[str, np.ndarray], mask: Mapping[str, Any], wrt: Sequence[str]
    ) -> Expected:
        inputs = {name: x for name, x in cut.items() if name not in given}
        if inputs["k1"].shape[2] == 0:
            return Expected(inputs, mask, wrt)
        return ExpectedGiven(inputs, dict(mask), {name: cut[name] for name in given}, tuple(wrt))

    expected = ExpectedParts(batch.inputs | rows, batch.parts, options, of=expected_of)
    names = ("kl", "lse1", "lse2", "mass1")
    for strategy in ("fused", "separate"):
        ours = results_of(
            cupy_library, batch, options, names, rows_given=rows, wrt=INPUTS, strategy=strategy
        )
        expected.check(ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (90, 20), "scale1": 0.2}], ids=str
)
def test_entropies(
    options: dict[str, Any], dtype: str, kind: str, rng: np.random.Generator, cupy_library: Cupy
) -> None:
    batch = batch_of_three(rng, kind, dtype)
    names = ("entropy", "cross_entropy")
    ours = results_of(cupy_library, batch, options, names, return_entropy=True)
    exact = {name: np.zeros(batch.inputs["dkl"].shape) for name in names}
    baseline = {name: x.copy() for name, x in exact.items()}
    for part in batch.parts:
        alone = {name: x[part.of(name)] for name, x in batch.inputs.items()}
        if alone["k1"].shape[2] == 0:
            continue
        state = reference.attention_kl(
            *(alone[name] for name in INPUTS), **options, return_entropy=True
        )
        for name, x in textbook_entropies(alone, options).items():
            exact[name][part.of(name)] = getattr(state, name)
            baseline[name][part.of(name)] = x
    for name in names:
        assert_accurate(name, ours[name], exact[name], baseline[name])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_in_parts(kind: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    """Each part of the keys alone, merged, and its gradients out of the merged state."""
    batch = batch_of_three(rng, kind)
    expected = ExpectedParts(batch.inputs, batch.parts, {})
    halves = []
    for half in (0, 1):
        parts = []
        for part in batch.parts:
            middle = (part.keys.start + part.keys.stop) // 2
            ends = ((part.keys.start, middle), (middle, part.keys.stop))[half]
            parts.append(part._replace(keys=slice(*ends)))
        entries = [{n: x[part.of(n)][0] for n, x in batch.inputs.items()} for part in parts]
        halves.append((parts, KINDS[kind](entries)))
    calls = []
    for _, half in halves:
        arrays, on_card = upload_ragged(cupy_library, half.inputs, half.lengths)
        calls.append((arrays, [arrays[name] for name in INPUTS], on_card))
    states = [skl.attention_kl(*qk, **lens, return_state=True) for _, qk, lens in calls]
    whole = skl.merge_states(*states)
    ours = {name: cupy_library.get(getattr(whole, name)) for name in ("kl", "lse1", "lse2")}
    ours = unpacked(ours, batch.lengths)
    rows = ours["kl"].shape[2]  # padding of the queries is as wide in all parts
    assert rows == batch.inputs["q1"].shape[2]
    found = {n: np.zeros(batch.inputs[n].shape, batch.inputs[n].dtype) for n in ("k1", "k2")}
    for (arrays, qk, lens), (parts, half) in zip(calls, halves, strict=True):
        gradients = skl.attention_kl_backward(arrays["dkl"], *qk, whole, wrt=("k1", "k2"), **lens)
        values = dict(zip(("k1", "k2"), map(cupy_library.get, gradients), strict=True))
        for name, value in unpacked(values, half.lengths).items():
            for part, placed in zip(parts, half.parts, strict=True):
                found[name][part.of(name)] = value[placed.of(name)]
    expected.check(ours | {"d" + name: x for name, x in found.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind: str, rng: np.random.Generator, cupy_library: Cupy) -> None:
    batch = batch_of_three(rng, kind)
    runs = [
        run_ragged(cupy_library, batch.inputs, {"causal": True}, batch.lengths, deterministic=True)
        for _ in range(20)
    ]
    for name in runs[0]:
        assert len({results[name].tobytes() for results in runs}) == 1, name


def test_threads(rng: np.random.Generator, cupy_library: Cupy) -> None:
    """Eight of them with batches of their own at once, with the bits that each has alone."""
    batches = [batch_of_three(rng, kind) for kind in [*KINDS] * 4]

    def compute(batch: Batch) -> dict[str, np.ndarray]:
        return run_ragged(
            cupy_library, batch.inputs, {"causal": True}, batch.lengths, deterministic=True
        )

    alone = [compute(batch) for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        for _ in range(3):
            for ours, expected in zip(pool.map(compute, batches), alone, strict=True):
                for name, x in expected.items():
                    assert same_bits(ours[name], x), name


def test_a_big_grid(rng: np.random.Generator, cupy_library: Cupy) -> None:
    """70 000 heads of batch entries, each with a row and keys that are not there."""
    inputs = random_inputs(rng, batch=35_000, heads=2, num_queries=5, num_keys=7, head_dim1=32)
    part = Part(0, slice(0, 4), slice(2, 6))
    alone = {name: np.ascontiguousarray(x[:, :, part.of(name)[2]]) for name, x in inputs.items()}
    lengths = {"kv_starts": [2] * 35_000, "kv_lens": [4] * 35_000, "q_lens": [4] * 35_000}
    ours = run_ragged(cupy_library, inputs, {"causal": True}, lengths)
    there = {name: x[:, :, part.of(name)[2]] for name, x in ours.items()}
    Expected(alone, {"causal": True}).check(there)
    assert (ours["kl"][:, :, 4:] == 0).all()
    assert (ours["dk2"][:, :, :2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replayed_with_new_lengths(
    kind: str, rng: np.random.Generator, torch: Any, torch_library: Torch
) -> None:
    """Only the card reads where sequences lie, so a replay finds those of its own time."""
    options = {"causal": True}

    def compute() -> dict[str, Any]:
        qk = [static[n] for n in INPUTS]
        state = skl.attention_kl(*qk, **options, **lengths, return_state=True)
        gradients = skl.attention_kl_backward(
            static["dkl"], *qk, state, wrt=INPUTS, **options, **lengths
        )
        rows = {name: getattr(state, name) for name in ("kl", "lse1", "lse2")}
        return rows | dict(zip(["d" + n for n in INPUTS], gradients, strict=True))

    first = batch_of_three(rng, kind)
    static, lengths = upload_ragged(torch_library, first.inputs, first.lengths)
    compute()  # compiled and loaded
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        results = compute()
    for turn in range(3):
        batch = batch_of_three(rng, kind, turn=turn)
        arrays, on_card = upload_ragged(torch_library, batch.inputs, batch.lengths)
        for name, array in (arrays | on_card).items():
            (static | lengths)[name].copy_(array)
        for array in results.values():
            array.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        ours = {name: torch_library.get(x) for name, x in results.items()}
        expected = ExpectedParts(batch.inputs, batch.parts, options)
        expected.check(unpacked(ours, batch.lengths))
