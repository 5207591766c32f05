"""streamkl_cupy.torch on the CPU, where the float64 reference computes."""

from __future__ import annotations

import contextlib
import copy
import doctest
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import reference
from streamkl_cupy.problem import INPUTS, LENGTHS

torch = pytest.importorskip("torch")
functional = pytest.importorskip("streamkl_cupy.torch")
attention_kl = functional.attention_kl

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

OPERATORS = torch.ops.streamkl_cupy
SUBSETS = [names for count in range(1, 5) for names in itertools.combinations(INPUTS, count)]
# N_Q > N_K: with a causal mask the first rows see no key.
FEW_KEYS = {"num_queries": 5, "num_keys": 3}


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> Any:
    seed = request.config.getoption("--seed")
    return torch.Generator().manual_seed(seed)


def draw(
    generator: Any,
    rank: int = 4,
    layout: str = "bhnd",
    *,
    dtype: Any = torch.float64,
    extra: tuple[int, ...] = (),
    num_queries: int = 5,
    num_keys: int = 7,
) -> list[Any]:
    """q1, k1, q2, k2 of different head dims and different numbers of key heads."""
    found = []
    for heads, length, head_dim in (
        (4, num_queries, 3),
        (2, num_keys, 3),
        (4, num_queries, 2),
        (1, num_keys, 2),
    ):
        shape = {2: (length,), 3: (heads, length), 4: (2, heads, length)}[rank]
        if rank == 4 and layout == "bnhd":
            shape = (2, length, heads)
        values = torch.randn(*extra, *shape, head_dim, generator=generator, dtype=torch.float64)
        found.append(values.to(dtype))
    return found


def differentiable(inputs: list[Any], names: tuple[str, ...] = INPUTS) -> list[Any]:
    """Leaves of the same values, those in `names` requiring grad."""
    pairs = zip(INPUTS, inputs, strict=True)
    return [value.detach().clone().requires_grad_(name in names) for name, value in pairs]


class Record(TorchDispatchMode):
    """The operators of the package that run, each with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator.namespace == "streamkl_cupy":
            self.calls.append((operator._schema.name.partition("::")[2], args))
        return operator(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


# Values and gradients.


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (1, None), "q_offset": -1},
        {"softcap1": 1.5, "softcap2": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (3, "bhnd"), (4, "bhnd"), (4, "bnhd")])
def test_values_and_gradients(rank: int, layout: str, mask: dict[str, Any], generator: Any) -> None:
    inputs = draw(generator, rank, layout, **FEW_KEYS)
    options = {**mask, "scale2": -0.7, "layout": layout}
    kl, lse1, lse2 = attention_kl(*inputs, **options, return_lse=True)
    exact = reference.attention_kl(*(x.numpy() for x in inputs), **options, return_state=True)
    for ours, expected in zip((kl, lse1, lse2), exact, strict=True):
        assert ours.dtype == torch.float64
        assert np.array_equal(ours.numpy(), expected)
    for reduction in functional.REDUCTIONS:
        assert torch.autograd.gradcheck(
            lambda *x, to=reduction: attention_kl(*x, **options, reduction=to),
            differentiable(inputs),
        )


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_only_what_requires_grad_is_computed(wanted: tuple[str, ...], generator: Any) -> None:
    inputs = draw(generator)
    leaves = differentiable(inputs, wanted)
    with Record() as record:
        attention_kl(*leaves, causal=True).sum().backward()
    assert record.names == ["attention_kl_state", "attention_kl_backward"]
    assert record.calls[1][1][10] == list(wanted)
    everything = differentiable(inputs)
    attention_kl(*everything, causal=True).sum().backward()
    for name, leaf, full in zip(INPUTS, leaves, everything, strict=True):
        if name in wanted:
            assert torch.equal(leaf.grad, full.grad)
        else:
            assert leaf.grad is None


def test_without_gradients_only_kl_is_computed(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    with Record() as record:
        with torch.no_grad():
            assert not attention_kl(*leaves).requires_grad
        attention_kl(*(leaf.detach() for leaf in leaves))
        with torch.inference_mode():
            attention_kl(*leaves, reduction="mean")
    assert record.names == ["attention_kl"] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_gradients_have_the_dtype_of_their_inputs(dtype: str, generator: Any) -> None:
    leaves = differentiable(draw(generator, dtype=getattr(torch, dtype)))
    attention_kl(*leaves, reduction="mean").backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.abs().max() > 0


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("num_keys", [0, 3, 7])
@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"window": (1, 0), "q_offset": 0},
        {"window": (0, 1), "q_offset": -2},
        {"window": (0, 0), "q_offset": 90},
    ],
    ids=str,
)
def test_mean_is_over_the_rows_that_see_a_key(
    mask: dict[str, Any], num_keys: int, layout: str, generator: Any
) -> None:
    inputs = draw(generator, layout=layout, num_keys=num_keys)
    options = {**mask, "layout": layout}
    kl, lse, _ = attention_kl(*inputs, **options, return_lse=True)
    seeing = lse > -torch.inf
    mean = attention_kl(*inputs, **options, reduction="mean")
    expected = kl[seeing].mean() if seeing.any() else torch.zeros((), dtype=kl.dtype)
    torch.testing.assert_close(mean, expected)
    weights = torch.rand(kl.shape, generator=generator)
    mean = attention_kl(*inputs, **options, reduction="mean", row_weights=weights)
    if seeing.any():
        expected = (kl * weights)[seeing].sum() / weights.double()[seeing].sum()
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize(("rank", "batch"), [(2, 1), (3, 4), (4, 2)])
def test_sum_and_batchmean(rank: int, batch: int, generator: Any) -> None:
    inputs = draw(generator, rank)
    total = attention_kl(*inputs).sum()
    torch.testing.assert_close(attention_kl(*inputs, reduction="sum"), total)
    torch.testing.assert_close(attention_kl(*inputs, reduction="batchmean"), total / batch)


def test_reductions_of_nothing(generator: Any) -> None:
    for shape in ((0, 4, 5, 3), (2, 0, 5, 3), (2, 4, 0, 3)):
        leaves = differentiable([torch.zeros(shape, dtype=torch.float64)] * 4)
        for reduction in ("sum", "mean", "batchmean"):
            loss = attention_kl(*leaves, reduction=reduction, causal=True)
            assert loss.item() == 0
            loss.backward()
            assert all(leaf.grad.shape == shape for leaf in leaves)


@pytest.mark.parametrize("shape", [(), (5,), (4, 1), (2, 1, 5), (2, 4, 5)])
@pytest.mark.parametrize("reduction", functional.REDUCTIONS)
def test_row_weights(reduction: str, shape: tuple[int, ...], generator: Any) -> None:
    leaves = differentiable(draw(generator))
    weights = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    weighted = attention_kl(*leaves) * weights
    expected = {
        "none": weighted,
        "sum": weighted.sum(),
        "mean": weighted.sum() / weights.expand(weighted.shape).sum(),
        "batchmean": weighted.sum() / 2,
    }[reduction]
    ours = attention_kl(*leaves, reduction=reduction, row_weights=weights)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    variables = [*leaves, weights]
    for ours_of, expected_of in zip(
        torch.autograd.grad(ours, variables, upstream),
        torch.autograd.grad(expected, variables, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours_of, expected_of)


def test_a_padding_mask_as_row_weights(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])[:, None]
    loss = attention_kl(*leaves, reduction="mean", row_weights=mask)
    kept = attention_kl(*leaves).masked_select(mask.expand(2, 4, 5))
    torch.testing.assert_close(loss, kept.mean())
    loss.backward()
    assert (leaves[0].grad[1, :, 2:] == 0).all()
    assert (leaves[0].grad[1, :, :2] != 0).any()


def test_a_coefficient_of_zero_gives_exact_zeros_and_never_none(generator: Any) -> None:
    for weights in (None, torch.zeros(2, 4, 5)):
        leaves = differentiable(draw(generator))
        loss = attention_kl(*leaves, reduction="mean", row_weights=weights)
        (0.0 * loss).backward()
        for leaf in leaves:
            assert leaf.grad is not None
            assert (leaf.grad == 0).all()


def test_ddp_with_a_coefficient_of_zero(tmp_path: Path, generator: Any) -> None:
    inputs = draw(generator, dtype=torch.float32)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        student = torch.nn.Linear(2, 2)
        replica = torch.nn.parallel.DistributedDataParallel(student)
        for coefficient in (0.0, 1.0):
            student.zero_grad()
            loss = attention_kl(*inputs[:2], replica(inputs[2]), inputs[3], reduction="mean")
            (coefficient * loss).backward()
            assert bool((student.weight.grad == 0).all()) == (coefficient == 0)
    finally:
        torch.distributed.destroy_process_group()


def test_log_sum_exps_have_no_gradient(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    kl, lse1, lse2 = attention_kl(*leaves, reduction="sum", return_lse=True)
    assert kl.requires_grad
    assert not lse1.requires_grad
    assert not lse2.requires_grad
    # A loss that mixes them in still gets the gradient of kl.
    (kl + lse1.sum()).backward()
    expected = differentiable(leaves)
    attention_kl(*expected, reduction="sum").backward()
    for ours, theirs in zip(leaves, expected, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_upstream_gradients_of_any_strides(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    kl = attention_kl(*leaves)
    upstream = torch.randn(5, 4, 2, dtype=torch.float64, generator=generator).permute(2, 1, 0)
    for gradient in (upstream, torch.ones(1, dtype=torch.float64).expand(2, 4, 5)):
        ours = torch.autograd.grad(kl, leaves, gradient, retain_graph=True)
        expected = torch.autograd.grad(kl, leaves, gradient.contiguous(), retain_graph=True)
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one, other)


def test_deterministic_is_torchs_own_switch(generator: Any) -> None:
    leaves = differentiable(draw(generator))

    def asked(**options: Any) -> bool:
        with Record() as record:
            attention_kl(*leaves, **options).sum().backward()
        return record.calls[1][1][-1]

    assert [asked(), asked(deterministic=True)] == [False, True]
    torch.use_deterministic_algorithms(True)
    try:
        assert [asked(), asked(deterministic=False)] == [True, False]
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_checkpoint(generator: Any) -> None:
    inputs = draw(generator)
    leaves, expected = differentiable(inputs), differentiable(inputs)
    checkpoint(lambda *x: attention_kl(*x).sum(), *leaves, use_reentrant=False).backward()
    attention_kl(*expected).sum().backward()
    for ours, theirs in zip(leaves, expected, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_autocast_casts_nothing(generator: Any) -> None:
    q1, k1, q2, k2 = draw(generator, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_kl(q1, k1, q2, k2, reduction="mean").dtype == torch.float64
        projected = torch.nn.functional.linear(q2, torch.eye(2))
        assert projected.dtype == torch.bfloat16
        with pytest.raises(TypeError, match="q2: expected the dtype of q1, float32"):
            attention_kl(q1, k1, projected, k2)


def test_the_module(generator: Any) -> None:
    leaves = differentiable(draw(generator, layout="bnhd"))
    options = {"causal": True, "scale1": 0.5, "layout": "bnhd"}
    loss = functional.AttentionKLLoss(**options)
    weights = torch.rand(2, 5, 1, generator=generator)
    assert torch.equal(loss(*leaves), attention_kl(*leaves, **options, reduction="mean"))
    assert torch.equal(
        copy.deepcopy(loss)(*leaves, row_weights=weights),
        attention_kl(*leaves, **options, reduction="mean", row_weights=weights),
    )
    assert repr(loss) == (
        "AttentionKLLoss(causal=True, scale1=0.5, scale2=None, layout='bnhd', reduction='mean', "
        "deterministic=None)"
    )
    with pytest.raises(ValueError, match="reduction: expected"):
        functional.AttentionKLLoss(reduction="average")
    with pytest.raises(TypeError, match="causal: expected True or False"):
        functional.AttentionKLLoss(causal=1)
    windowed = functional.AttentionKLLoss(window=(3, -1), q_offset=2)
    assert repr(windowed).endswith("deterministic=None, window=(3, None), q_offset=2)")
    inputs = draw(generator)
    mask = {"window": (3, None), "q_offset": 2}
    assert torch.equal(windowed(*inputs), attention_kl(*inputs, **mask, reduction="mean"))
    with pytest.raises(TypeError, match="deterministic: expected True or False"):
        functional.AttentionKLLoss(deterministic=0)


# Second derivatives and forward mode.


def test_a_second_derivative_is_an_error_when_it_is_asked_for(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    # Another part of the loss may need it; ours alone must not vanish in silence.
    gradients = torch.autograd.grad(attention_kl(*leaves).sum(), leaves, create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)
    with pytest.raises(RuntimeError, match="got a second derivative"):
        gradients[3].sum().backward()


def test_second_derivatives_and_forward_mode_of_torch_func(generator: Any) -> None:
    q1, k1, q2, k2 = draw(generator)

    def loss(keys: Any) -> Any:
        return attention_kl(q1, k1, q2, keys).sum()

    with pytest.raises(RuntimeError, match="got a second derivative"):
        torch.func.grad(lambda keys: torch.func.grad(loss)(keys).sum())(k2)
    for transform in (lambda x: torch.func.jvp(loss, (x,), (x,)), torch.func.hessian(loss)):
        with pytest.raises(NotImplementedError, match=r"kl: expected reverse mode, got forward"):
            transform(k2)


def test_forward_mode_is_refused(generator: Any) -> None:
    q1, k1, q2, k2 = draw(generator)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k2, torch.ones_like(k2))
        with pytest.raises(TypeError, match=r"k2: .* got one with a forward-mode tangent"):
            attention_kl(q1, k1, q2, dual)
        with pytest.raises(NotImplementedError, match=r"kl: expected reverse mode, got forward"):
            attention_kl(q1.requires_grad_(), k1, q2, dual)


# torch.func.


@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (3, "bnhd"), (4, "bhnd"), (4, "bnhd")])
def test_func_grad_and_vmap(rank: int, layout: str, generator: Any) -> None:
    count = 3
    inputs = draw(generator, rank, layout, extra=(count,))

    def function(*x: Any) -> Any:
        return attention_kl(*x, causal=True, window=(2, None), scale2=0.3, layout=layout)

    def gradient(*x: Any) -> Any:
        leaves = differentiable(list(x))
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    functional_gradient = torch.func.grad(lambda *x: function(*x).sum(), argnums=(0, 1, 2, 3))
    # Batched all, or some of them, or along another axis.
    for in_dims in ((0, 0, 0, 0), (None, 0, None, 0), (0, None, None, None), (1, -1, 0, None)):
        batched = [
            x[0] if dim is None else x.movedim(0, dim)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        each = [
            [x[0] if dim is None else x[i] for x, dim in zip(inputs, in_dims, strict=True)]
            for i in range(count)
        ]
        ours = torch.vmap(function, in_dims)(*batched)
        torch.testing.assert_close(ours, torch.stack([function(*x) for x in each]))
        gradients = torch.vmap(functional_gradient, in_dims)(*batched)
        expected = [torch.stack(parts) for parts in zip(*(gradient(*x) for x in each), strict=True)]
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rank", [3, 4])
def test_vmap_over_nothing(rank: int, generator: Any) -> None:
    inputs = [x[None][:0] for x in draw(generator, rank)]
    kl = torch.vmap(attention_kl)(*inputs)
    assert kl.shape == (0, *inputs[0].shape[1:-1])
    gradient = torch.func.grad(lambda *x: attention_kl(*x).sum(), argnums=3)
    assert torch.vmap(gradient)(*inputs).shape == inputs[3].shape


@pytest.mark.parametrize(
    ("size", "batch", "num_queries"), [(3, 2, 0), (0, 2, 5), (3, 0, 5), (0, 2, 0)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("names", [(), ("lse1",), ("lse1", "lse2"), ("entropy",)], ids=str)
def test_vmap_over_no_rows(
    names: tuple[str, ...], padded: bool, size: int, batch: int, num_queries: int
) -> None:
    """Shapes are those of the calls one by one, though nothing tells a result from none."""
    lengths = (num_queries, 7, num_queries, 7)
    inputs = [torch.ones(size, batch, 4, length, 8, dtype=torch.float64) for length in lengths]
    rows = (size, batch, 4, num_queries)
    given = {n: torch.zeros(rows, dtype=torch.float64) for n in names if n != "entropy"}
    if padded:
        given["kv_lens"] = torch.ones(size, batch, dtype=torch.int32)
    has_entropy = "entropy" in names

    def function(*x: Any) -> Any:
        named = dict(zip(given, x[4:], strict=True))
        return attention_kl(*x[:4], **named, return_lse=True, return_entropy=has_entropy)

    results = torch.vmap(function)(*inputs, *given.values())
    assert [x.shape for x in results] == [rows] * (3 + 2 * has_entropy)
    wanted = tuple(i for i, name in enumerate((*INPUTS, *given)) if name != "kv_lens")
    gradient = torch.func.grad(lambda *x: function(*x)[0].sum(), argnums=wanted)
    leaves = [*inputs, *given.values()]
    for position, one in zip(wanted, torch.vmap(gradient)(*leaves), strict=True):
        assert one.shape == leaves[position].shape


def test_vmap_in_vmap_and_per_sample_weights(generator: Any) -> None:
    inputs = draw(generator, rank=3, extra=(2, 3))
    weights = torch.rand(2, 3, 4, 5, generator=generator, dtype=torch.float64)

    def function(*x: Any) -> Any:
        return attention_kl(*x[:4], reduction="mean", row_weights=x[4])

    ours = torch.vmap(torch.vmap(function))(*inputs, weights)
    for i, j in itertools.product(range(2), range(3)):
        expected = function(*(x[i, j] for x in (*inputs, weights)))
        torch.testing.assert_close(ours[i, j], expected)


def test_a_jacobian(generator: Any) -> None:
    inputs = draw(generator, rank=2)
    jacobian = torch.func.jacrev(attention_kl, argnums=3)(*inputs)
    expected = torch.autograd.functional.jacobian(
        lambda k2: attention_kl(*inputs[:3], k2), inputs[3]
    )
    torch.testing.assert_close(jacobian, expected)


def test_batched_upstream_gradients_point_to_torch_func(generator: Any) -> None:
    *others, k2 = differentiable(draw(generator, rank=2))
    kl = attention_kl(*others, k2)
    with pytest.raises(RuntimeError, match=r"expected torch.func.vmap or jacrev, got is_grads_bat"):
        torch.autograd.grad(kl, k2, torch.eye(5, dtype=kl.dtype), is_grads_batched=True)


# Entropies.


@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (4, "bnhd")])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_entropies(rank: int, layout: str, mask: dict[str, Any], generator: Any) -> None:
    inputs = draw(generator, rank, layout, **FEW_KEYS)
    options = {**mask, "layout": layout}
    arrays = {n: x.numpy() for n, x in zip(INPUTS, inputs, strict=True)}
    exact = reference.attention_kl(**arrays, **options, return_entropy=True)
    results = attention_kl(*inputs, **options, return_lse=True, return_entropy=True)
    for ours, expected in zip(results, exact, strict=True):
        assert np.array_equal(ours.numpy(), expected)
    leaves, others = differentiable(inputs), differentiable(inputs)
    with Record() as record:
        kl, entropy, cross = attention_kl(*leaves, **options, reduction="mean", return_entropy=True)
        kl.backward()
    assert record.names == ["attention_kl_entropy", "attention_kl_backward"]
    assert entropy.shape == cross.shape == inputs[0].shape[:-1]
    assert not entropy.requires_grad
    assert not cross.requires_grad
    attention_kl(*others, **options, reduction="mean").backward()
    for one, other in zip(leaves, others, strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.autograd.gradcheck(
        lambda *x: attention_kl(*x, **options, return_entropy=True)[0], differentiable(inputs)
    )


def test_entropies_transformed_and_compiled(generator: Any) -> None:
    inputs = draw(generator, 3, extra=(3,))

    def function(*x: Any) -> Any:
        return attention_kl(*x, causal=True, window=(2, None), q_offset=1, return_entropy=True)

    for ours, *each in zip(
        torch.vmap(function)(*inputs),
        *(function(*x) for x in zip(*inputs, strict=True)),
        strict=True,
    ):
        torch.testing.assert_close(ours, torch.stack(each))
    inputs = draw(generator)
    options = (True, 2, None, 1, None, 0.3, None, 2.0, None, "bhnd", False)
    arguments = (*differentiable(inputs), *options)
    outcome = torch.library.opcheck(OPERATORS.attention_kl_entropy.default, arguments)
    assert set(outcome.values()) == {"SUCCESS"}, outcome
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves, others = differentiable(inputs), differentiable(inputs)
    for one, other in zip(compiled(*leaves), function(*others), strict=True):
        torch.testing.assert_close(one, other)
    compiled(*leaves)[0].sum().backward()
    function(*others)[0].sum().backward()
    for one, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_entropies_of_what_is_given_are_refused(generator: Any) -> None:
    inputs = draw(generator)
    lse1 = torch.zeros(inputs[0].shape[:-1])
    with pytest.raises(ValueError, match=r"return_entropy: expected False with given log-sum-exps"):
        attention_kl(*inputs, lse1=lse1, return_entropy=True)


# Given log-sum-exps.

GIVEN = (("lse1",), ("lse2",), ("lse1", "lse2"))


def draw_lse(generator: Any, rows: Any, given: tuple[str, ...]) -> dict[str, Any]:
    return {name: 2 + torch.rand(rows, generator=generator, dtype=torch.float64) for name in given}


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (3, "bhnd"), (4, "bnhd")])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (2, 1), "q_offset": -1}], ids=str)
def test_given_values_and_gradients(
    given: tuple[str, ...], rank: int, layout: str, mask: dict[str, Any], generator: Any
) -> None:
    inputs = draw(generator, rank, layout, **FEW_KEYS)
    options = {**mask, "scale2": -0.7, "layout": layout}
    lse = draw_lse(generator, inputs[0].shape[:-1], given)
    kl, *used = attention_kl(*inputs, **options, **lse, return_lse=True)
    arrays = {n: x.numpy() for n, x in zip(INPUTS, inputs, strict=True)}
    outer = {n: x.numpy() for n, x in lse.items()}
    exact = reference.attention_kl(**arrays, **outer, **options, return_state=True)
    for ours, expected in zip((kl, *used), exact, strict=False):
        assert np.array_equal(ours.numpy(), expected)
    leaves = [*differentiable(inputs), *(x.clone().requires_grad_() for x in lse.values())]
    for reduction in ("none", "mean"):
        assert torch.autograd.gradcheck(
            lambda *x, to=reduction: attention_kl(
                *x[:4], **dict(zip(given, x[4:], strict=True)), **options, reduction=to
            ),
            leaves,
        )


@pytest.mark.parametrize("wanted", [("q2", "k2"), ("k1", "lse2"), ("lse1",), ("lse1", "lse2")])
def test_given_ones_are_constants_unless_they_require_grad(
    wanted: tuple[str, ...], generator: Any
) -> None:
    inputs = draw(generator)
    lse = draw_lse(generator, inputs[0].shape[:-1], ("lse1", "lse2"))
    leaves = differentiable(inputs, wanted)
    outer = {n: x.to(torch.float32).requires_grad_(n in wanted) for n, x in lse.items()}
    with Record() as record:
        attention_kl(*leaves, **outer).sum().backward()
    assert record.names == ["attention_kl_given", "attention_kl_given_backward"]
    assert record.calls[1][1][12] == list(wanted)
    for name, leaf in zip((*INPUTS, *outer), (*leaves, *outer.values()), strict=True):
        assert (leaf.grad is not None) is (name in wanted)
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype
    with Record() as record:
        attention_kl(*inputs, **lse)
        attention_kl(*inputs)
    assert record.names == ["attention_kl_given", "attention_kl"]


def test_given_second_derivatives_are_refused(generator: Any) -> None:
    leaves = differentiable(draw(generator))
    lse1 = draw_lse(generator, leaves[0].shape[:-1], ("lse1",))["lse1"].requires_grad_()
    kl = attention_kl(*leaves, lse1=lse1).sum()
    for leaf in (lse1, leaves[3]):
        (gradient,) = torch.autograd.grad(kl, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="got a second derivative"):
            gradient.sum().backward()


@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (3, "bnhd"), (4, "bhnd"), (4, "bnhd")])
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_given_func_grad_and_vmap(
    given: tuple[str, ...], rank: int, layout: str, generator: Any
) -> None:
    inputs = draw(generator, rank, layout, extra=(3,))
    lse = list(draw_lse(generator, inputs[0].shape[:-1], given).values())

    def function(*x: Any) -> Any:
        outer = dict(zip(given, x[4:], strict=True))
        return attention_kl(*x[:4], **outer, causal=True, window=(2, None), layout=layout)

    count = 4 + len(given)
    gradient = torch.func.grad(lambda *x: function(*x).sum(), argnums=tuple(range(count)))
    for in_dims in ((0,) * count, (0, None, None, 0, *(None,) * len(given))):
        arrays = [x[0] if d is None else x for x, d in zip((*inputs, *lse), in_dims, strict=True)]
        each = [
            [x if d is None else x[i] for x, d in zip(arrays, in_dims, strict=True)]
            for i in range(3)
        ]
        ours = torch.vmap(function, in_dims)(*arrays)
        torch.testing.assert_close(ours, torch.stack([function(*x) for x in each]))
        expected = [torch.stack(parts) for parts in zip(*(gradient(*x) for x in each), strict=True)]
        for one, other in zip(torch.vmap(gradient, in_dims)(*arrays), expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_given_opcheck_and_compile(given: tuple[str, ...], generator: Any) -> None:
    inputs = draw(generator)
    lse = draw_lse(generator, inputs[0].shape[:-1], given)
    outer = [lse.get(name) for name in ("lse1", "lse2")]
    options = (True, 2, None, 1, None, 0.3, None, 2.0, None, "bhnd", False)
    state = OPERATORS.attention_kl_given(*inputs, *outer, *options)
    upstream = torch.randn(state[0].shape, generator=generator, dtype=torch.float64)
    leaves = differentiable(inputs)
    for operator, arguments in (
        (OPERATORS.attention_kl_given, (*leaves, *outer, *options)),
        (
            OPERATORS.attention_kl_given_backward,
            (upstream, *inputs, *state, list(given), ["k2", *given], *options),
        ),
    ):
        outcome = torch.library.opcheck(operator.default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, outcome

    def loss(*x: Any) -> Any:
        named = dict(zip(given, x[4:], strict=True))
        return attention_kl(*x[:4], **named, window=(1, 1), q_offset=1, reduction="mean")

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        leaves = [*differentiable(inputs), *(x.clone().requires_grad_() for x in lse.values())]
        function(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_given_ones_that_do_not_fit(generator: Any) -> None:
    inputs = draw(generator)
    rows = inputs[0].shape[:-1]
    for lse, error, text in (
        (1.0, TypeError, r"lse1: expected a torch tensor, got float"),
        (torch.zeros(rows)[..., :1], ValueError, r"lse1: expected the shape of kl"),
        (torch.zeros(rows, device="meta"), ValueError, r"lse1: expected a tensor on cpu like q1"),
        (torch.zeros(rows, dtype=torch.int64), TypeError, r"lse1: expected bfloat16, float16"),
    ):
        with pytest.raises(error, match=text):
            attention_kl(*inputs, lse1=lse)


# Operators, fake tensors and compilation.


LENGTHS_OF: dict[str, dict[str, list[int]]] = {
    "right": {"kv_lens": [7, 3], "q_lens": [5, 0]},
    "left": {"kv_starts": [2, 7]},
    "packed": {"cu_seqlens_q": [0, 2, 2, 4], "cu_seqlens_k": [1, 4, 6, 7]},
}


def ragged(name: str, generator: Any) -> tuple[list[Any], dict[str, Any]]:
    """Leaves and lengths; packed sequences in a layout of their own."""
    inputs = draw(generator)
    if name == "packed":
        inputs = [x[0].transpose(0, 1).contiguous() for x in inputs]
    lengths = {n: torch.tensor(x, dtype=torch.int32) for n, x in LENGTHS_OF[name].items()}
    return differentiable(inputs), lengths


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (1, 1), "q_offset": 1}], ids=str)
@pytest.mark.parametrize("name", LENGTHS_OF)
def test_ragged_values_and_gradients(name: str, mask: dict[str, Any], generator: Any) -> None:
    leaves, lengths = ragged(name, generator)
    kl, lse1, _, entropy, cross_entropy = attention_kl(
        *leaves, **mask, **lengths, return_lse=True, return_entropy=True
    )
    arrays = [x.detach().numpy() for x in leaves]
    on_host = {n: x.numpy() for n, x in lengths.items()}
    exact = reference.attention_kl(*arrays, **mask, **on_host, return_entropy=True)
    for ours, expected in (
        (kl, exact.kl),
        (lse1, exact.lse1),
        (entropy, exact.entropy),
        (cross_entropy, exact.cross_entropy),
    ):
        np.testing.assert_array_equal(ours.detach().numpy(), expected)
    assert torch.autograd.gradcheck(lambda *x: attention_kl(*x, **mask, **lengths), leaves)
    lse = torch.randn(kl.shape, generator=generator, dtype=kl.dtype).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda lse, *x: attention_kl(*x, lse1=lse, **mask, **lengths), (lse, *leaves)
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LENGTHS_OF)
def test_ragged_reductions(name: str, weighted: bool, generator: Any) -> None:
    leaves, lengths = ragged(name, generator)
    kl, lse1, _ = attention_kl(*leaves, **lengths, return_lse=True)
    weights = torch.rand(kl.shape, generator=generator, dtype=kl.dtype) if weighted else None
    of_rows = torch.ones_like(kl) if weights is None else weights
    seen = torch.isfinite(lse1)
    assert 0 < seen.sum() < seen.numel()
    total = (kl * of_rows).sum()
    expected = {
        "sum": total,
        "mean": total / (of_rows * seen).sum(),
        "batchmean": total / (3 if name == "packed" else 2),
    }
    for reduction, value in expected.items():
        loss = attention_kl(*leaves, **lengths, reduction=reduction, row_weights=weights)
        torch.testing.assert_close(loss, value)
    module = functional.AttentionKLLoss()
    torch.testing.assert_close(module(*leaves, row_weights=weights, **lengths), expected["mean"])


def test_a_mean_of_nothing_is_zero(generator: Any) -> None:
    leaves, _ = ragged("right", generator)
    nothing = torch.zeros(2, dtype=torch.int32)
    loss = attention_kl(*leaves, kv_lens=nothing, reduction="mean")
    loss.backward()
    assert loss == 0
    assert all((x.grad == 0).all() for x in leaves)


@pytest.mark.parametrize("name", LENGTHS_OF)
@pytest.mark.parametrize("has_entropy", [False, True])
def test_ragged_opcheck_and_compile(name: str, has_entropy: bool, generator: Any) -> None:
    leaves, lengths = ragged(name, generator)
    values = [lengths.get(n) for n in LENGTHS]
    options = (True, *(None,) * 8, "bhnd", False)
    forward = (*leaves, None, None, *values, None, None, has_entropy, *options)
    state = OPERATORS.attention_kl_ragged.default(*forward)
    rows = [part.detach() for part in state[:6]]
    backward = (
        torch.ones_like(rows[0]),
        *(x.detach() for x in leaves),
        *rows,
        [],
        ["q2", "k1"],
        *values,
        None,
        None,
        *options,
    )
    for operator, arguments in (
        (OPERATORS.attention_kl_ragged, forward),
        (OPERATORS.attention_kl_ragged_backward, backward),
    ):
        outcome = torch.library.opcheck(operator.default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}

    def loss(*x: Any) -> Any:
        return attention_kl(*x, causal=True, **lengths, reduction="mean")

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*leaves), leaves)
    for gradient, expected in zip(ours, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_comes_back_to_padding_does_not_matter(dtype: Any, generator: Any) -> None:
    leaves, lengths = ragged("right", generator)
    rows = leaves[0].shape[:-1]
    lse = {n: x.to(dtype) for n, x in draw_lse(generator, rows, ("lse1", "lse2")).items()}
    every = [*leaves, *(x.requires_grad_() for x in lse.values())]
    kl, lse1, _ = attention_kl(*leaves, **lse, **lengths, return_lse=True)
    is_padding = lse1 == -torch.inf
    assert 0 < is_padding.sum() < is_padding.numel()
    dkl = torch.randn(rows, generator=generator, dtype=torch.float64).masked_fill(is_padding, 0)
    expected = torch.autograd.grad(kl, every, dkl, retain_graph=True)
    poisoned = dkl.masked_fill(is_padding, torch.nan)
    for ours, theirs in zip(torch.autograd.grad(kl, every, poisoned), expected, strict=True):
        assert torch.equal(ours, theirs)
    for of_lse in expected[4:]:
        assert (of_lse[is_padding] == 0).all()
        assert (of_lse[~is_padding] != 0).all()


def test_ends_that_decrease_are_refused(generator: Any) -> None:
    leaves, lengths = ragged("packed", generator)
    for name, ends in (("cu_seqlens_q", [0, 5, 3, 5]), ("cu_seqlens_k", [0, 5, 3, 7])):
        wrong = lengths | {name: torch.tensor(ends, dtype=torch.int32)}
        with pytest.raises(ValueError, match=rf"^{name}: .* got 3 after 5 \(index 2\)"):
            attention_kl(*leaves, **wrong)


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({"q_offset": 2**70}, {"q_offset": 100}),
        ({"q_offset": -(2**70)}, {"q_offset": -100}),
        ({"q_offset": 2**70, "causal": True}, {"q_offset": 100}),
        ({"window": (2**70, 0)}, {"window": (100, 0)}),
        ({"window": (2**70, 2**80)}, {}),
        ({"window": (2**70, 0), "q_offset": 2**70}, {"window": (0, None), "q_offset": 0}),
        ({"window": (0, 2**70), "q_offset": -(2**70)}, {"window": (None, 0), "q_offset": 0}),
    ],
    ids=str,
)
def test_numbers_of_more_than_64_bits(
    options: dict[str, Any], alike: dict[str, Any], generator: Any
) -> None:
    inputs = draw(generator)
    expected = attention_kl(*inputs, **alike)
    assert torch.equal(attention_kl(*inputs, **options), expected)
    arrays = [x.numpy() for x in inputs]
    np.testing.assert_array_equal(reference.attention_kl(*arrays, **options), expected)
    loss = functional.AttentionKLLoss(**options, reduction="none")
    assert torch.equal(loss(*inputs), expected)
    leaves, lengths = ragged("left", generator)
    ours = attention_kl(*leaves, **lengths, **options)
    assert torch.equal(ours, attention_kl(*leaves, **lengths, **alike))


def test_a_longest_sequence_of_more_than_64_bits(generator: Any) -> None:
    leaves, lengths = ragged("packed", generator)
    kl = attention_kl(*leaves, **lengths, max_seqlen_q=2**70, max_seqlen_k=2**63)
    assert torch.equal(kl, attention_kl(*leaves, **lengths))
    kl.sum().backward()


def test_ragged_under_vmap(generator: Any) -> None:
    leaves, lengths = ragged("right", generator)
    several = [torch.stack([x.detach(), 2 * x.detach()]) for x in leaves]
    lens = torch.stack([lengths["kv_lens"], torch.tensor([1, 7], dtype=torch.int32)])

    def loss(q1: Any, k1: Any, q2: Any, k2: Any, lens: Any) -> Any:
        return attention_kl(q1, k1, q2, k2, kv_lens=lens, reduction="sum")

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 3)))(*several, lens)
    for idx in range(2):
        alone = [x[idx].clone().requires_grad_() for x in several]
        expected = torch.autograd.grad(loss(*alone, lens[idx]), (alone[0], alone[3]))
        for ours, exact in zip(mapped, expected, strict=True):
            torch.testing.assert_close(ours[idx], exact)
    packed, ends = ragged("packed", generator)
    with pytest.raises(RuntimeError, match="got packed sequences; call it once for each"):
        torch.func.vmap(lambda x: attention_kl(x, *packed[1:], **ends))(
            torch.stack([packed[0]] * 2)
        )


def test_lengths_that_do_not_fit(generator: Any) -> None:
    leaves, lengths = ragged("right", generator)
    with pytest.raises(TypeError, match=r"^kv_lens: expected a torch tensor, got list"):
        attention_kl(*leaves, kv_lens=[7, 3])
    with pytest.raises(TypeError, match=r"^kv_lens: expected int32, got int64"):
        attention_kl(*leaves, kv_lens=lengths["kv_lens"].long())
    with pytest.raises(ValueError, match=r"^kv_lens: expected a tensor on cpu like q1"):
        attention_kl(*leaves, kv_lens=lengths["kv_lens"].to("meta"))
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected an array together with"):
        attention_kl(*leaves, cu_seqlens_q=lengths["kv_lens"])


@pytest.mark.parametrize(("rank", "layout"), [(2, "bhnd"), (3, "bhnd"), (4, "bnhd")])
def test_opcheck(rank: int, layout: str, generator: Any) -> None:
    inputs = draw(generator, rank, layout)
    options = (True, 3, None, -1, None, 0.3, 1.5, None, None, layout, False)
    state = OPERATORS.attention_kl_state(*inputs, *options)
    upstream = torch.randn(state[0].shape, generator=generator, dtype=torch.float64)
    for operator, arguments in (
        (OPERATORS.attention_kl, (*inputs, *options)),
        (OPERATORS.attention_kl_state, (*inputs, *options)),
        (
            OPERATORS.attention_kl_backward,
            (upstream, *inputs, *state, ["k2", "q1"], *options),
        ),
    ):
        outcome = torch.library.opcheck(operator.default, arguments)
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def test_softcaps_compiled_and_transformed(generator: Any) -> None:
    def function(*x: Any) -> Any:
        return attention_kl(*x, causal=True, softcap1=1.5, softcap2=0.8)

    inputs = draw(generator, 3, extra=(3,))
    each = [function(*x) for x in zip(*inputs, strict=True)]
    torch.testing.assert_close(torch.vmap(function)(*inputs), torch.stack(each))
    inputs = draw(generator)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves, others = differentiable(inputs), differentiable(inputs)
    compiled(*leaves).sum().backward()
    loss = functional.AttentionKLLoss(causal=True, reduction="sum", softcap1=1.5, softcap2=0.8)
    assert "softcap1=1.5, softcap2=0.8" in repr(loss)
    loss(*others).backward()
    for one, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with pytest.raises(TypeError, match="softcap1: expected a finite number above 0"):
        attention_kl(*inputs, softcap1=torch.tensor(2.0))
    bounded = torch.compile(
        lambda *x: attention_kl(*x, softcap1=torch.ones(())), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="softcap1: expected a real number, got a tensor"):
        bounded(*inputs)


def test_an_operator_alone_is_differentiable(generator: Any) -> None:
    inputs = draw(generator)
    expected = differentiable(inputs)
    attention_kl(*expected).sum().backward()
    options = (False, *(None,) * 8, "bhnd", False)
    for operator in (OPERATORS.attention_kl, OPERATORS.attention_kl_state):
        leaves = differentiable(inputs)
        result = operator(*leaves, *options)
        (result if operator is OPERATORS.attention_kl else result[0]).sum().backward()
        for ours, theirs in zip(leaves, expected, strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        outcome = torch.library.opcheck(operator.default, (*leaves, *options))
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def test_meta_tensors() -> None:
    leaves = [
        torch.empty(2, 4, n, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for n in (5, 7, 5, 7)
    ]
    kl, lse1, lse2 = attention_kl(*leaves, return_lse=True)
    for rows in (kl, lse1, lse2):
        assert (rows.device.type, rows.dtype, rows.shape) == ("meta", torch.float32, (2, 4, 5))
    loss = attention_kl(*leaves, reduction="mean", row_weights=torch.empty(5, device="meta"))
    loss.backward()
    for leaf in leaves:
        assert (leaf.grad.device.type, leaf.grad.dtype) == ("meta", torch.bfloat16)
        assert leaf.grad.shape == leaf.shape


def test_fake_tensors_of_a_card_and_what_it_refuses() -> None:
    with FakeTensorMode():

        def fake(head_dim: int = 16, dtype: Any = torch.bfloat16) -> Any:
            return torch.empty(2, 4, 5, head_dim, device="cuda", dtype=dtype)

        kl = attention_kl(fake(), fake(), fake(), fake())
        assert (kl.device.type, kl.dtype, kl.shape) == ("cuda", torch.float32, (2, 4, 5))
        arguments = [fake() for _ in range(4)]
        options = (False, *(None,) * 8, "bhnd", False)
        state = OPERATORS.attention_kl_state(*arguments, *options)
        gradients = OPERATORS.attention_kl_backward(kl, *arguments, *state, ["k2"], *options)
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16]
        with pytest.raises(TypeError, match="q1: expected bfloat16, float16 or float32 on a GPU"):
            attention_kl(*(fake(dtype=torch.float64) for _ in range(4)))
        with pytest.raises(ValueError, match="q1 and k1: expected a head dimension"):
            attention_kl(*(fake(12) for _ in range(4)))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("reduction", "backend", "dynamic"),
    [
        ("none", "eager", False),
        ("mean", "eager", True),
        ("none", "aot_eager", True),
        ("mean", "aot_eager", False),
        ("batchmean", "aot_eager", True),
    ],
)
def test_compiled_whole(reduction: str, backend: str, dynamic: bool, generator: Any) -> None:
    inputs = draw(generator)
    weights = torch.rand(2, 1, 5, generator=generator)

    def function(*x: Any) -> Any:
        return attention_kl(
            *x,
            causal=True,
            window=(2, -1),
            scale2=0.3,
            reduction=reduction,
            row_weights=weights,
            return_lse=True,
        )

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for wanted in (INPUTS, ("k2",), ()):
        results = []
        for call in (compiled, function):
            leaves = differentiable(inputs, wanted)
            kl, lse1, lse2 = call(*leaves)
            assert not lse1.requires_grad
            if wanted:
                kl.sum().backward()
            results.append([kl, lse1, lse2, *(leaf.grad for leaf in leaves)])
        for name, ours, expected in zip(("", "", "", *INPUTS), *results, strict=True):
            if name in ("", *wanted):
                assert torch.equal(ours, expected)
            else:
                assert ours is None


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_for_lengths_that_change(generator: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_kl, backend=counter, fullgraph=True)
    for length in (5, 6, 8, 9, 11):
        inputs = draw(generator, num_queries=length, num_keys=length + 2)
        options = {"causal": True, "scale1": 0.2, "reduction": "mean"}
        assert torch.equal(compiled(*inputs, **options), attention_kl(*inputs, **options))
    assert counter.frame_count == 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_for_chunks_of_queries(generator: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_kl, backend=counter, fullgraph=True)
    inputs = draw(generator, num_queries=5, num_keys=30)
    for first in (2, 7, 12, 17):
        options = {"causal": True, "window": (first + 1, None), "q_offset": first}
        assert torch.equal(compiled(*inputs, **options), attention_kl(*inputs, **options))
    assert counter.frame_count <= 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_module_and_transforms(generator: Any) -> None:
    inputs = draw(generator)
    loss = functional.AttentionKLLoss(causal=True)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), loss(*inputs))
    # A transform around a compiled function, and in a function compiled in parts.
    transformed = torch.func.grad(loss, argnums=3)
    for call in (
        torch.func.grad(torch.compile(loss, backend="aot_eager"), argnums=3),
        torch.compile(transformed, backend="aot_eager"),
    ):
        torch.testing.assert_close(call(*inputs), transformed(*inputs))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"expected torch.compile and torch.func apart"):
        torch.compile(transformed, backend="aot_eager", fullgraph=True)(*inputs)


@pytest.mark.usefixtures("fresh_dynamo")
def test_errors_of_a_compiled_call_name_the_argument(generator: Any) -> None:
    q1, k1, q2, k2 = draw(generator)
    compiled = torch.compile(attention_kl, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="k2: expected the batch size of q1, 2, got 1"):
        compiled(q1, k1, q2, k2[:1])
    with pytest.raises(Exception, match="scale2: expected a real number"):
        compiled(q1, k1, q2, k2, scale2=torch.tensor(0.5))
    with pytest.raises(Exception, match="row_weights: expected a shape that broadcasts"):
        compiled(q1, k1, q2, k2, row_weights=torch.ones(3))


def test_exported(generator: Any) -> None:
    inputs = draw(generator)
    loss = functional.AttentionKLLoss(causal=True)
    program = torch.export.export(loss, tuple(inputs)).module()
    assert torch.equal(program(*inputs), loss(*inputs))
    # It may be trained all the same.
    leaves, expected = differentiable(inputs), differentiable(inputs)
    program(*leaves).backward()
    loss(*expected).backward()
    for ours, theirs in zip(leaves, expected, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


# What is not a plain dense tensor.


def test_lazy_negation_is_resolved(generator: Any) -> None:
    inputs = draw(generator)
    lazy = torch.complex(inputs[0], inputs[0] + 1).conj().imag.movedim(0, 0)
    plain = lazy.resolve_neg()
    assert lazy.is_neg()
    # Its last stride is 2; the copy that resolves it has 1.
    assert torch.equal(attention_kl(lazy, *inputs[1:]), attention_kl(plain, *inputs[1:]))
    leaves = differentiable([plain, *inputs[1:]])
    attention_kl(*leaves).sum().backward()
    lazy_leaves = [lazy.requires_grad_(), *differentiable(inputs)[1:]]
    attention_kl(*lazy_leaves).sum().backward()
    assert torch.equal(lazy_leaves[0].grad, leaves[0].grad)


def not_dense(values: Any) -> dict[str, Any]:
    matrix = values[0, 0]
    with contextlib.suppress(UserWarning):
        return {
            "sparse": values.to_sparse(),
            "csr": matrix.to_sparse_csr(),
            "nested": torch.nested.nested_tensor([matrix, matrix], layout=torch.jagged),
            "complex": torch.complex(values, values).conj(),
            "integer": values.to(torch.int32),
            "quantised": torch.quantize_per_tensor(values.float(), 0.1, 0, torch.qint8),
        }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "kind", ["sparse", "csr", "nested", "complex", "integer", "quantised", "array", "none"]
)
def test_what_is_no_dense_float_tensor_is_refused(kind: str, generator: Any) -> None:
    inputs = draw(generator)
    others = {"array": inputs[0].numpy(), "none": None}
    value = others[kind] if kind in others else not_dense(inputs[0])[kind]
    with pytest.raises(TypeError, match="q1: expected"):
        attention_kl(value, *inputs[1:])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_row_weights_that_are_no_plain_tensor(generator: Any) -> None:
    inputs = draw(generator)
    lazy = torch.complex(torch.ones(5), torch.arange(-5.0, 0.0)).conj().imag
    assert lazy.is_neg()
    ours = attention_kl(*inputs, reduction="mean", row_weights=lazy)
    assert torch.equal(ours, attention_kl(*inputs, reduction="mean", row_weights=lazy.clone()))
    nested = torch.nested.nested_tensor([torch.ones(5)], layout=torch.jagged)
    with pytest.raises(TypeError, match="row_weights: expected a dense torch tensor, got a nested"):
        attention_kl(*inputs, row_weights=nested)


# Errors.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal": 1}, TypeError, "causal: expected True or False"),
        ({"scale1": "large"}, TypeError, "scale1: expected a real number"),
        ({"scale2": float("nan")}, ValueError, "scale2: expected a finite number"),
        ({"scale1": torch.tensor(0.5)}, TypeError, "scale1: expected a real number"),
        ({"layout": "bdhn"}, ValueError, "layout: expected"),
        ({"reduction": "average"}, ValueError, 'reduction: expected "none", "sum", "mean" or'),
        ({"reduction": None}, TypeError, 'reduction: expected "none", "sum", "mean" or'),
        ({"deterministic": 1}, TypeError, "deterministic: expected True or False"),
        ({"return_lse": 1}, TypeError, "return_lse: expected True or False"),
        ({"row_weights": [1.0]}, TypeError, "row_weights: expected a torch tensor, got list"),
        ({"row_weights": torch.ones(3)}, ValueError, "row_weights: expected a shape that"),
        ({"row_weights": torch.ones(1, 2, 4, 5)}, ValueError, "row_weights: expected a shape that"),
        ({"row_weights": torch.ones(5) * 1j}, TypeError, "row_weights: expected real weights"),
        ({"row_weights": torch.ones(5).to_sparse()}, TypeError, "row_weights: expected a dense"),
        ({"row_weights": torch.ones(5, device="meta")}, ValueError, "row_weights: expected a ten"),
    ],
)
def test_options_are_checked_before_anything_runs(
    options: dict[str, Any], error: type[Exception], text: str, generator: Any
) -> None:
    leaves = differentiable(draw(generator))
    with Record() as record, pytest.raises(error, match=text):
        attention_kl(*leaves, **options)
    assert record.names == []


@pytest.mark.parametrize("needs_grad", [False, True])
def test_inputs_that_do_not_fit(needs_grad: bool, generator: Any) -> None:
    q1, k1, q2, k2 = (x.requires_grad_(needs_grad) for x in draw(generator))
    with pytest.raises(TypeError, match="k1: expected the dtype of q1, float64, got float32"):
        attention_kl(q1, k1.float(), q2, k2)
    with pytest.raises(ValueError, match="k2: expected the batch size of q1, 2, got 1"):
        attention_kl(q1, k1, q2, k2[:1])
    with pytest.raises(ValueError, match="q2: expected a last stride of 1"):
        attention_kl(q1, k1, q2.mT.contiguous().mT, k2)
    with pytest.raises(ValueError, match="k1: expected a tensor on cpu like q1, got one on meta"):
        attention_kl(q1, k1.to("meta"), q2, k2)


# The import, and what the docstrings show.


def python(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def test_without_torch_the_import_says_what_to_install() -> None:
    done = python(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import streamkl_cupy\n"
        "try:\n"
        "    import streamkl_cupy.torch\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "streamkl_cupy.torch needs PyTorch 2.6 or newer" in done.stdout, done.stderr


def test_the_import_needs_no_cupy() -> None:
    done = python("import sys, streamkl_cupy.torch; print('cupy' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(functional).failed == 0
