"""streamkl_cupy.torch on the card: gradients, compilation, graphs, streams, memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Expected, Torch, random_inputs, upload_all
from tests.gpu.delay import delay
from tests.gpu.ragged import ExpectedParts, Part, from_packed, to_packed
from tests.gpu.usage import TorchUsage, Usage, padded

SHAPE = {"batch": 2, "heads": 4, "key_heads1": 2, "num_queries": 130, "num_keys": 90}
OPTIONS = {"causal": True, "scale1": 0.2}
SUBSETS = [names for count in range(1, 5) for names in itertools.combinations(INPUTS, count)]


@pytest.fixture(scope="session")
def door(torch: Any) -> Any:
    """`streamkl_cupy.torch`."""
    import streamkl_cupy.torch

    return streamkl_cupy.torch


@pytest.fixture
def fresh_dynamo(torch: Any) -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Problem:
    """Inputs on the host and on the card, and what has to come out."""

    def __init__(
        self,
        library: Torch,
        rng: np.random.Generator,
        dtype: str = "bfloat16",
        layout: str = "bhnd",
    ) -> None:
        self.library = library
        self.inputs = random_inputs(rng, dtype, **SHAPE)
        if layout == "bnhd":
            swapped = {n: x.swapaxes(1, 2) for n, x in self.inputs.items()}
            self.inputs = {n: np.ascontiguousarray(x) for n, x in swapped.items()}
        arrays = upload_all(library, self.inputs)
        self.dkl = arrays.pop("dkl")
        self.arrays = arrays

    def leaves(self, wanted: tuple[str, ...] = INPUTS) -> list[Any]:
        """New tensors of the same values, those wanted requiring grad."""
        return [
            array.detach().clone().requires_grad_(name in wanted)
            for name, array in self.arrays.items()
        ]

    def check(self, results: dict[str, Any], dkl: Any = None, **options: Any) -> None:
        """Hold outputs against float64; the upstream gradient is `dkl`, or that of the inputs."""
        inputs = dict(self.inputs)
        if dkl is not None:
            inputs["dkl"] = np.ascontiguousarray(self.library.get(dkl).astype(np.float32))
        for name in INPUTS:
            if "d" + name in results:
                gradient, like = results["d" + name], self.arrays[name]
                assert (gradient.dtype, gradient.shape) == (like.dtype, like.shape)
        got = {name: self.library.get(x.detach()) for name, x in results.items()}
        Expected(inputs, options or OPTIONS).check(got)


@pytest.fixture
def problem(torch_library: Torch, rng: np.random.Generator) -> Problem:
    return Problem(torch_library, rng)


def gradients(leaves: list[Any]) -> dict[str, Any]:
    return {"d" + n: leaf.grad for n, leaf in zip(INPUTS, leaves, strict=True)}


# Values and gradients.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_values_and_gradients(
    layout: str, dtype: str, door: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    problem = Problem(torch_library, rng, dtype, layout)
    options = OPTIONS | {"layout": layout}
    leaves = problem.leaves()
    kl, lse1, lse2 = door.attention_kl(*leaves, **options, return_lse=True)
    kl.backward(problem.dkl)
    problem.check({"kl": kl, "lse1": lse1, "lse2": lse2, **gradients(leaves)}, **options)
    assert not lse1.requires_grad
    assert not lse2.requires_grad


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_a_subset(wanted: tuple[str, ...], door: Any, problem: Problem) -> None:
    leaves = problem.leaves(wanted)
    door.attention_kl(*leaves, **OPTIONS).backward(problem.dkl)
    problem.check({name: x for name, x in gradients(leaves).items() if name[1:] in wanted})
    assert all(leaf.grad is None for leaf in leaves if not leaf.requires_grad)


@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_reductions(
    is_weighted: bool, reduction: str, door: Any, torch: Any, problem: Problem
) -> None:
    leaves = problem.leaves()
    weights = None
    if is_weighted:
        weights = (torch.arange(130, device="cuda") % 3).float().expand(2, 1, 130)
    # 130 queries and 90 keys: the first 40 rows see none.
    seeing = torch.ones(2, 4, 130, device="cuda") if weights is None else weights.expand(2, 4, 130)
    divisor = {"sum": 1, "mean": float(seeing[..., 40:].sum()), "batchmean": 2}[reduction]
    loss = door.attention_kl(*leaves, **OPTIONS, reduction=reduction, row_weights=weights)
    loss.backward()
    kl = door.attention_kl(*problem.arrays.values(), **OPTIONS)
    torch.testing.assert_close(loss, (kl * seeing).sum() / divisor)
    problem.check(gradients(leaves), dkl=seeing / divisor)


def test_nothing_waits_for_the_device(door: Any, torch: Any, problem: Problem) -> None:
    leaves = problem.leaves()
    weights = torch.rand(2, 1, 130, device="cuda")

    def everything() -> None:
        for reduction in door.REDUCTIONS:
            loss = door.attention_kl(*leaves, **OPTIONS, reduction=reduction, row_weights=weights)
            loss.sum().backward()

    everything()
    torch.cuda.synchronize()
    delay()
    busy = torch.cuda.Event()
    busy.record()
    everything()
    # The host is through with it while the device has not begun.
    assert not busy.query()
    torch.cuda.synchronize()


def test_a_coefficient_of_zero_gives_exact_zeros(door: Any, torch: Any, problem: Problem) -> None:
    leaves = problem.leaves()
    (0.0 * door.attention_kl(*leaves, **OPTIONS, reduction="mean")).backward()
    for leaf in leaves:
        assert leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad == 0).all()


def test_deterministic_as_torch_says(door: Any, torch: Any, problem: Problem) -> None:
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            leaves = problem.leaves()
            door.attention_kl(*leaves, **OPTIONS).backward(problem.dkl)
            runs.append([leaf.grad for leaf in leaves])
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_a_second_derivative(door: Any, torch: Any, problem: Problem) -> None:
    leaves = problem.leaves()
    kl = door.attention_kl(*leaves, **OPTIONS)
    (gradient,) = torch.autograd.grad(kl.sum(), leaves[3:], create_graph=True)
    with pytest.raises(RuntimeError, match="got a second derivative"):
        gradient.sum().backward()


def test_lazy_negation_is_resolved(door: Any, torch: Any) -> None:
    values = torch.randn(3, 50, 64, device="cuda", dtype=torch.complex32)
    lazy = values.conj().imag
    assert lazy.is_neg()
    plain = lazy.resolve_neg()
    others = [torch.randn(3, 50, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    assert torch.equal(door.attention_kl(lazy, *others), door.attention_kl(plain, *others))


def test_what_the_card_does_not_take(
    door: Any, torch: Any, problem: Problem, launched: Any
) -> None:
    launched.clear()
    q1, k1, q2, k2 = problem.leaves()
    with pytest.raises(TypeError, match="q1: expected bfloat16, float16 or float32 on a GPU"):
        door.attention_kl(*(x.double() for x in (q1, k1, q2, k2)))
    with pytest.raises(ValueError, match="k1: expected an array on cuda:0 like q1"):
        door.attention_kl(q1, k1.cpu(), q2, k2)
    with pytest.raises(ValueError, match="row_weights: expected a tensor on cuda:0 like q1"):
        door.attention_kl(q1, k1, q2, k2, row_weights=torch.ones(130))
    assert launched == []


# Operators, fake tensors and compilation.


def test_opcheck(door: Any, torch: Any, problem: Problem) -> None:
    operators = torch.ops.streamkl_cupy
    options = (True, 6, None, 2, None, 0.3, None, None, None, "bhnd", True)
    inputs = list(problem.arrays.values())
    state = operators.attention_kl_state(*inputs, *options)
    for operator, arguments in (
        (operators.attention_kl, (*problem.leaves(), *options)),
        (operators.attention_kl_state, (*problem.leaves(), *options)),
        (
            operators.attention_kl_backward,
            (problem.dkl, *inputs, *state, ["k2", "q1"], *options),
        ),
    ):
        outcome = torch.library.opcheck(operator.default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def test_fake_tensors(door: Any, torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        leaves = [
            torch.empty(2, n, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            for n in (5, 7, 5, 7)
        ]
        kl = door.attention_kl(*leaves)
        assert (kl.device.type, kl.dtype, kl.shape) == ("cuda", torch.float32, (2, 5))
        kl.sum().backward()
        for leaf in leaves:
            assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_whole(
    mode: str | None, door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    linear = torch.nn.Linear(64, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    loss = door.AttentionKLLoss(causal=True, deterministic=True)

    def step(q1: Any, k1: Any, x: Any, k2: Any) -> Any:
        return loss(q1, k1, linear(x), k2)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(4):  # warm up, record, replay, replay
        leaves = Problem(torch_library, rng).leaves(("k2",))
        results = []
        for call in (compiled, step):
            torch.compiler.cudagraph_mark_step_begin()
            linear.zero_grad()
            leaves[3].grad = None
            value = call(*leaves)
            value.backward()
            results.append(
                [x.detach().clone() for x in (value, linear.weight.grad, leaves[3].grad)]
            )
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager)


# torch.func.


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_func_grad_and_vmap(
    rank: int, door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    problems = [Problem(torch_library, rng) for _ in range(3)]

    def part(x: Any) -> Any:
        return {4: x, 3: x[0], 2: x[0, 0]}[rank]

    stacked = [torch.stack([part(p.arrays[name]) for p in problems]) for name in INPUTS]

    def loss(*x: Any) -> Any:
        return door.attention_kl(*x, **OPTIONS, deterministic=True, reduction="sum")

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    results = torch.vmap(gradient)(*stacked)
    for position, problem in enumerate(problems):
        leaves = [part(x).detach().clone().requires_grad_() for x in problem.arrays.values()]
        loss(*leaves).backward()
        alone = gradient(*(x.detach() for x in leaves))
        for ours, one, leaf in zip(results, alone, leaves, strict=True):
            assert torch.equal(one, leaf.grad)
            # The plan of the batch may differ from that of one.
            torch.testing.assert_close(ours[position], leaf.grad, rtol=0.02, atol=0.02)
        if rank == 4:
            names = ["d" + name for name in INPUTS]
            mine = dict(zip(names, (x[position] for x in results), strict=True))
            problem.check(mine, dkl=torch.ones(2, 4, 130, device="cuda"))


# Streams and graphs.


def test_a_producer_still_running_on_a_side_stream(door: Any, torch: Any, problem: Problem) -> None:
    import cupy

    late = [torch.full_like(x, float("nan")) for x in problem.arrays.values()]
    door.attention_kl(*problem.leaves(), **OPTIONS).backward(problem.dkl)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with cupy.cuda.ExternalStream(side.cuda_stream):
            delay()
        for to, source in zip(late, problem.arrays.values(), strict=True):
            to.copy_(source)
        leaves = [x.requires_grad_() for x in late]
        kl = door.attention_kl(*leaves, **OPTIONS)
        kl.backward(problem.dkl)
    # The backward ran on the stream of the forward.
    side.synchronize()
    problem.check({"kl": kl, **gradients(leaves)})


def test_a_training_step_captured_and_replayed_with_new_inputs(
    door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    static = Problem(torch_library, rng)
    leaves = static.leaves()
    weights = torch.rand(2, 1, 130, device="cuda")
    loss = door.AttentionKLLoss(**OPTIONS, reduction="sum")

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None
        value = loss(*leaves, row_weights=weights)
        value.backward()
        return value

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        value = step()
    for _ in range(3):
        problem = Problem(torch_library, rng)
        with torch.no_grad():
            for leaf, array in zip(leaves, problem.arrays.values(), strict=True):
                leaf.copy_(array)
            weights.uniform_()
        for result in (value.detach(), *gradients(leaves).values()):
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        kl = door.attention_kl(*problem.arrays.values(), **OPTIONS)
        torch.testing.assert_close(value, (kl * weights).sum())
        problem.check(gradients(leaves), dkl=weights.expand(2, 4, 130))


def test_packed_sequences_captured_and_replayed_with_new_ones(
    door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    ends = {"cu_seqlens_q": [0, 100, 101, 230], "cu_seqlens_k": [0, 90, 200, 210]}
    others = {"cu_seqlens_q": [0, 7, 150, 220], "cu_seqlens_k": [0, 0, 130, 210]}
    inputs = random_inputs(rng, heads=4, key_heads1=2, num_queries=230, num_keys=210)
    packed = {name: to_packed(name, x) for name, x in inputs.items()}
    arrays = upload_all(torch_library, packed)
    dkl = arrays.pop("dkl")
    leaves = [x.requires_grad_() for x in arrays.values()]
    lengths = {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in ends.items()}

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None
        kl, lse1, lse2 = door.attention_kl(*leaves, causal=True, **lengths, return_lse=True)
        kl.backward(dkl)
        return kl, lse1, lse2

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        rows = step()
    for now in (ends, others):
        for name, values in now.items():
            lengths[name].copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        results = dict(zip(("kl", "lse1", "lse2"), rows, strict=True)) | gradients(leaves)
        got = {n: from_packed(torch_library.get(x.detach())) for n, x in results.items()}
        starts = zip(now["cu_seqlens_q"], now["cu_seqlens_q"][1:], strict=False)
        keys = zip(now["cu_seqlens_k"], now["cu_seqlens_k"][1:], strict=False)
        parts = [Part(0, slice(*q), slice(*k)) for q, k in zip(starts, keys, strict=True)]
        ExpectedParts(inputs, parts, {"causal": True}).check(got)


@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
def test_padded_losses(
    reduction: str, door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    problem = Problem(torch_library, rng)
    lengths = {"kv_lens": [90, 40], "q_lens": [130, 77]}
    on_card = {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in lengths.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = door.attention_kl(*problem.leaves(), **OPTIONS, **on_card, reduction=reduction)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrays = [problem.inputs[name] for name in INPUTS]
    state = reference.attention_kl(*arrays, **OPTIONS, **lengths, return_state=True)
    seen = np.isfinite(state.lse1).sum()
    assert 0 < seen < state.kl.size
    divisor = {"mean": seen, "sum": 1, "batchmean": 2}[reduction]
    assert loss.item() == pytest.approx(state.kl.sum() / divisor, rel=1e-4)


def test_50_in_flight(
    door: Any, torch: Any, torch_library: Torch, rng: np.random.Generator
) -> None:
    problems = [Problem(torch_library, rng) for _ in range(5)]
    expected = []
    for problem in problems:
        leaves = problem.leaves()
        kl = door.attention_kl(*leaves, **OPTIONS, deterministic=True)
        kl.backward(problem.dkl)
        expected.append([kl.detach(), *(leaf.grad for leaf in leaves)])
    torch.cuda.synchronize()
    delay()
    flying = []
    for position in range(50):
        problem = problems[position % 5]
        leaves = problem.leaves()
        flying.append((leaves, door.attention_kl(*leaves, **OPTIONS, deterministic=True)))
    for position, (_, kl) in enumerate(flying):
        kl.backward(problems[position % 5].dkl)
    for position, (leaves, kl) in enumerate(flying):
        results = [kl.detach(), *(leaf.grad for leaf in leaves)]
        for ours, alone in zip(results, expected[position % 5], strict=True):
            assert torch.equal(ours, alone)


# Memory.


def test_memory(door: Any, torch: Any, problem: Problem) -> None:
    rows = padded(4 * 2 * 4 * 130)
    leaves = problem.leaves(("q2", "k2"))
    door.attention_kl(*leaves, **OPTIONS, deterministic=True).backward(problem.dkl)
    leaves = problem.leaves(("q2", "k2"))
    with Usage() as cupys:
        with TorchUsage(torch) as usage, torch.no_grad():
            kl = door.attention_kl(*leaves, **OPTIONS)
        assert usage.peak == usage.now == rows
        del kl
        with TorchUsage(torch) as usage:
            kl = door.attention_kl(*leaves, **OPTIONS, deterministic=True)
        assert usage.peak == usage.now == 5 * rows
        with TorchUsage(torch) as usage:
            kl.backward(problem.dkl)
        # Row statistics for the backward, which are gone after it, and the two gradients.
        results = sum(padded(2 * leaf.numel()) for leaf in leaves[2:])
        assert usage.peak == padded(16 * 2 * 4 * 130) + results
        # What was saved is freed, and kl stays.
        assert usage.now == results - 4 * rows
    assert cupys.peak == 0


def test_10000_calls_do_not_grow(door: Any, torch: Any, problem: Problem) -> None:
    leaves = problem.leaves(("q2", "k2"))

    def calls(count: int) -> tuple[int, int]:
        for _ in range(count):
            torch.autograd.grad(door.attention_kl(*leaves, **OPTIONS), leaves[2:], problem.dkl)
        torch.cuda.synchronize()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return torch.cuda.memory_allocated(), 4096 * pages

    device, host = calls(1000)
    device_after, host_after = calls(4000)
    # The thread of autograd may not have let go of the last call yet. A leak of one small object a
    # call would show: the allocator hands out no fewer than 512 bytes.
    assert device_after - device < 4000 * 512 // 2
    assert host_after - host < 400_000
