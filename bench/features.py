"""``python -m bench features``: every mask, padding, packing, given log-sum-exps, merged parts,
entropies, softcaps and float32, each held against float64, and its time beside the plain call's.

Errors are of a small problem, whose visible pairs are a matrix here; times of a large one, in
rounds in which all take turns. The peers have none of this, so they stay away.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import streamkl_cupy as skl
from streamkl_cupy import audit
from streamkl_cupy.problem import INPUTS

from . import textbook
from .report import Column, Report, Row
from .runner import Say
from .textbook import OUTPUTS, Solution

SMALL, LARGE, LARGE_QUICK = (2, 1024), (32, 8192), (2, 512)
HEAD_DIM = 128
ROUNDS, ROUNDS_QUICK = 7, 2
PLAIN = "no mask"
NUM_PARTS = 4
FACTOR, FACTOR_FLOAT32 = 2.0, 4.0
LSES, ENTROPIES = ("lse1", "lse2"), ("entropy", "cross_entropy")
COLUMNS = (
    Column("case", "feature"),
    Column("status", "status"),
    *(Column(name, name, ".1e") for name in (*OUTPUTS, *ENTROPIES)),
    Column("rule", "rule"),
    Column("pairs", "visible pairs", ".3f"),
    Column("forward_ms", "forward (ms)", ".3f"),
    Column("forward_of_plain", "rate, of no mask", ".2f"),
    Column("backward_ms", "dQ2 dK2 (ms)", ".3f"),
    Column("backward_of_plain", "rate, of no mask", ".2f"),
)


@dataclass(frozen=True, slots=True)
class Feature:
    """What a call may have beside its four inputs.

    Attributes
    ----------
    label
        For its row.
    options
        Of every call; made for a length.
    kind
        ``"given"`` takes both log-sum-exps from outside, ``"merged"`` the keys in parts,
        ``"packed"`` sequences along the length. Empty for one call of four arrays.
    dtype, softcap
        Of the inputs; bound of both sides' logits.
    queries
        Share of the length that the queries have.
    has_rule
        Whether the accuracy rule binds it.
    """

    label: str
    options: Callable[[int, torch.device], Mapping[str, Any]] = lambda length, device: {}
    kind: str = ""
    dtype: str = "bfloat16"
    softcap: float | None = None
    queries: float = 1.0
    has_rule: bool = True


def _lengths(length: int) -> list[int]:
    """Of packed sequences, one of one token among them."""
    parts = [length // 2, length // 4, length // 8, 1]
    return [*parts, length - sum(parts)]


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _padding(length: int, device: torch.device) -> Mapping[str, Any]:
    return {
        "kv_starts": _int32([length // 8], device),
        "kv_lens": _int32([length // 2], device),
        "q_lens": _int32([3 * length // 4], device),
    }


def _packing(length: int, device: torch.device) -> Mapping[str, Any]:
    ends = torch.tensor([0, *_lengths(length)]).cumsum(0).to(device, torch.int32)
    longest = {"max_seqlen_q": length // 2, "max_seqlen_k": length // 2}
    return {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}


FEATURES = (
    Feature(PLAIN),
    Feature("causal", lambda n, _: {"causal": True}),
    Feature("window of N / 8", lambda n, _: {"causal": True, "window": (n // 8 - 1, None)}),
    Feature("window to both sides", lambda n, _: {"window": (n // 16, n // 16)}),
    Feature("chunk of queries", lambda n, _: {"causal": True, "q_offset": n // 2}, queries=0.25),
    Feature("padded", _padding),
    Feature("packed, causal", _packing, "packed"),
    Feature("lse1 and lse2 given", kind="given"),
    Feature("keys in four parts, merged", kind="merged"),
    Feature("entropies", lambda n, _: {"return_entropy": True}),
    Feature("softcap 2", lambda n, _: {"softcap1": 2.0, "softcap2": 2.0}, softcap=2.0),
    Feature("float32", dtype="float32"),
    Feature("tf32", lambda n, _: {"precision": "tf32"}, dtype="float32", has_rule=False),
)


@dataclass(slots=True)
class Problem:
    """A feature with inputs ``(H, N, D)``."""

    feature: Feature
    heads: int
    length: int
    device: torch.device
    seed: int = 0
    options: dict[str, Any] = field(init=False)
    inputs: dict[str, torch.Tensor] = field(init=False)
    dkl: torch.Tensor = field(init=False)
    given: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device, generator=generator)

        dtype = getattr(torch, self.feature.dtype)
        lengths = {"q": round(self.length * self.feature.queries), "k": self.length}
        self.options = dict(self.feature.options(self.length, self.device))
        self.inputs = {
            name: draw(self.heads, lengths[name[0]], HEAD_DIM).to(dtype) for name in INPUTS
        }
        self.dkl = draw(self.heads, lengths["q"])
        if self.feature.kind == "given":
            # Of teachers whose softmax covers more than these keys.
            state = self.forward()
            self.given = {name: getattr(state, name) + 0.5 for name in LSES}

    @property
    def scales(self) -> tuple[float, float]:
        return (HEAD_DIM**-0.5, HEAD_DIM**-0.5)

    def allowed(self) -> torch.Tensor | None:
        """Which keys each query sees; None for all."""
        num_queries, num_keys = self.inputs["q1"].shape[1], self.length
        rows = torch.arange(num_queries, device=self.device)[:, None]
        keys = torch.arange(num_keys, device=self.device)[None]
        options = self.options
        if "kv_lens" in options:
            first, count, queries = (int(options[n][0]) for n in ("kv_starts", "kv_lens", "q_lens"))
            return (rows < queries) & (keys >= first) & (keys < first + count)
        if "cu_seqlens_q" in options:
            ends = options["cu_seqlens_q"][1:].long()
            same = torch.bucketize(rows, ends, right=True) == torch.bucketize(
                keys, ends, right=True
            )
            return same & (keys <= rows)
        if not options.keys() & {"causal", "window"}:
            return None
        places = rows + options.get("q_offset", num_keys - num_queries)
        left, right = options.get("window", (None, None))
        right = 0 if options.get("causal") else right
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.device)
        if left is not None:
            seen &= keys >= places - left
        if right is not None:
            seen &= keys <= places + right
        return seen

    def forward(self) -> Any:
        """A state, with the entropies where they are asked for."""
        if self.feature.kind == "merged":
            return skl.merge_states(
                *(
                    skl.attention_kl(*self._arranged(part), **self.options, return_state=True)
                    for part in self.parts()
                )
            )
        arranged = self._arranged(self.inputs)
        options = {"return_state": True} | self.options | self.given
        return skl.attention_kl(*arranged, **options)

    def backward(self, state: Any, wrt: tuple[str, ...], **choices: Any) -> tuple[Any, ...]:
        """Gradients in the layout of the call."""
        options = {n: x for n, x in self.options.items() if n != "return_entropy"}
        dkl = self.dkl if self.feature.kind == "packed" else self.dkl[None]
        inputs = next(self.parts()) if self.feature.kind == "merged" else self.inputs
        gradients = skl.attention_kl_backward(
            dkl, *self._arranged(inputs), state, wrt=wrt, **options, **choices
        )
        return tuple(gradients)

    def parts(self) -> Any:
        """The inputs with the keys in parts."""
        cuts = {n: x.chunk(NUM_PARTS, 1) for n, x in self.inputs.items() if n[0] == "k"}
        for i in range(NUM_PARTS):
            yield self.inputs | {name: cut[i].contiguous() for name, cut in cuts.items()}

    def solve(self, *, exact: bool) -> Solution:
        """The outputs in float64, or by the textbook formula."""
        inputs = [self.inputs[name] for name in INPUTS]
        given = tuple(x[0] if (x := self.given.get(n)) is not None else None for n in LSES)
        return textbook.solve(
            inputs,
            self.dkl,
            self.scales,
            exact=exact,
            softcap=self.feature.softcap,
            allowed=self.allowed(),
            given=given,
        )

    def outputs(self, **choices: Any) -> Solution:
        """Ours, as ``(H, N, ...)``."""
        state = self.forward()
        found = {name: getattr(state, name) for name in ("kl", *LSES)}
        found |= {n: getattr(state, n) for n in ENTROPIES if self.options.get("return_entropy")}
        # Of merged states a part's own keys have its gradients; those of queries are sums of them.
        wrt = ("k1", "k2") if self.feature.kind == "merged" else INPUTS
        gradients = self.backward(state, wrt, **choices)
        found |= {"d" + name: x for name, x in zip(wrt, gradients, strict=True)}
        if self.feature.kind == "packed":
            return {n: x.transpose(0, 1) if x.ndim == 3 else x for n, x in found.items()}
        return {name: x[0] for name, x in found.items()}

    def _arranged(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        if self.feature.kind == "packed":
            return [inputs[name].transpose(0, 1).contiguous() for name in INPUTS]
        return [inputs[name][None] for name in INPUTS]


def errors_of(feature: Feature, device: torch.device) -> Row:
    """Of both strategies the worse one, output by output."""
    problem = Problem(feature, *SMALL, device)
    exact, baseline = problem.solve(exact=True), problem.solve(exact=False)
    strategies = ({}, {"deterministic": True})
    errors: dict[str, float] = {}
    for found in (problem.outputs(**choices) for choices in strategies):
        for name, x in found.items():
            # A part of the keys has the gradients of the first of them.
            expected = exact[name][:, : x.shape[1]]
            errors[name] = max(errors.get(name, 0.0), textbook.error(x, expected))
    factor = FACTOR_FLOAT32 if feature.dtype == "float32" else FACTOR
    broken = [
        name
        for name, error in errors.items()
        if not error <= audit.limit(name, factor / 2 * textbook.error(baseline[name], exact[name]))
    ]
    rule = "none" if not feature.has_rule else f"broken: {', '.join(broken)}" if broken else "holds"
    status = "wrong" if broken and feature.has_rule else "ok"
    return {"status": status, "rule": rule, "errors": errors, **errors}


def times_of(length: tuple[int, int], rounds: int, device: torch.device) -> dict[str, Row]:
    """Medians of a forward and of a backward of side 2, all in turns."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    shares: dict[str, float] = {}
    for feature in FEATURES:
        problem = Problem(feature, *length, device)
        allowed = problem.allowed()
        whole = length[1] ** 2
        pairs = problem.inputs["q1"].shape[1] * length[1] if allowed is None else int(allowed.sum())
        shares[feature.label] = pairs / whole
        state = problem.forward()
        calls[feature.label, "forward"] = problem.forward
        if feature.kind != "merged":
            calls[feature.label, "backward"] = lambda problem=problem, state=state: (
                problem.backward(state, ("q2", "k2"))
            )
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for key in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[key]()
            end.record()
            end.synchronize()
            times[key].append(begin.elapsed_time(end))
    rows: dict[str, Row] = {}
    for feature in FEATURES:
        row: Row = {"pairs": shares[feature.label]}
        for direction in ("forward", "backward"):
            if (feature.label, direction) in times:
                own = statistics.median(times[feature.label, direction])
                plain = statistics.median(times[PLAIN, direction])
                row[f"{direction}_ms"] = own
                row[f"{direction}_of_plain"] = plain * shares[feature.label] / own
        rows[feature.label] = row
    return rows


def run(*, quick: bool, say: Say) -> Report:
    """Every feature: its errors, then its times."""
    device = torch.device("cuda")
    rows = []
    for feature in FEATURES:
        say(f"features: errors of {feature.label}")
        rows.append({"case": feature.label, "ours": True, **errors_of(feature, device)})
        torch.cuda.empty_cache()
    say("features: times")
    shape = LARGE_QUICK if quick else LARGE
    times = times_of(shape, ROUNDS_QUICK if quick else ROUNDS, device)
    return Report(
        name="features",
        title=f"Errors, {SMALL[0]} heads, N = {SMALL[1]}; times, BH = {shape[0]}, N = {shape[1]}; "
        f"d = {HEAD_DIM}, bfloat16 but for float32",
        columns=COLUMNS,
        rows=[row | times[row["case"]] for row in rows],
        notes=[
            "Error: norm(x - reference) / norm(reference) against float64, the worse of the "
            "backward that the plan takes and the deterministic one. Rule: at most "
            f"{FACTOR:g} times the error of the textbook float32 formula ({FACTOR_FLOAT32:g} times "
            f"for float32 inputs), plus {audit.FORWARD_FLOOR:g} for kl and lse and "
            f"{audit.GRADIENT_FLOOR:g} for gradients. tf32 rounds its inputs and has none.",
            f"Times: medians of {ROUNDS} calls, all in turns, random normal inputs. Rate: of "
            "visible pairs, as a share of that without a mask.",
            "Merged: gradients of the keys of the first part; the time is that of four forwards "
            "and the merge.",
        ],
    )
