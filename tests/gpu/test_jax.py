"""`streamkl_cupy.jax` on a card: XLA's buffers, streams and command buffers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import jit
from streamkl_cupy.chain import Bound
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Expected, random_inputs, same_bits
from tests.gpu.ragged import ExpectedParts, Part, from_packed, poison, to_packed
from tests.gpu.usage import Usage

SHAPE = {"batch": 2, "heads": 4, "key_heads1": 2, "key_heads2": 1, "num_queries": 90}
SHAPE |= {"num_keys": 70, "head_dim1": 64, "head_dim2": 40}
CUDA_MEMORY_DEVICE = 2
POSITIONS = (0, 1, 2, 3)


class Door:
    """The functions of `streamkl_cupy.jax` on NumPy arrays that are put on a card."""

    def __init__(self, jax: Any, device: int = 0) -> None:
        from streamkl_cupy.jax import attention_kl

        self.jax = jax
        self.device = jax.devices("gpu")[device]
        self.attention_kl = attention_kl

    def put(self, inputs: dict[str, np.ndarray]) -> list[Any]:
        """``q1 k1 q2 k2 dkl``"""
        return [self.jax.device_put(inputs[name], self.device) for name in (*INPUTS, "dkl")]

    def loss(self, **options: Any) -> Callable[..., Any]:
        """``sum(dkl * kl)``, and kl and lse beside it."""

        def loss(q1: Any, k1: Any, q2: Any, k2: Any, dkl: Any) -> Any:
            kl, lse1, lse2 = self.attention_kl(q1, k1, q2, k2, **options, return_lse=True)
            return (dkl * kl).sum(), (kl, lse1, lse2)

        return loss

    def gradient(self, wrt: tuple[str, ...] = INPUTS, **options: Any) -> Callable[..., Any]:
        positions = tuple(INPUTS.index(name) for name in wrt)
        return self.jax.value_and_grad(self.loss(**options), positions, has_aux=True)

    @staticmethod
    def get(results: Any, wrt: tuple[str, ...] = INPUTS) -> dict[str, np.ndarray]:
        """What `gradient` returned, by name."""
        (_, rows), gradients = results
        named = dict(zip(("kl", "lse1", "lse2"), rows, strict=True))
        named |= {"d" + name: x for name, x in zip(wrt, gradients, strict=True)}
        return {name: np.asarray(x) for name, x in named.items()}


@pytest.fixture
def door(jax: Any) -> Door:
    return Door(jax)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, int], int]]:
    """The pointers and the stream of every launch."""
    seen: list[tuple[dict[str, int], int]] = []
    original = Bound.launch

    def recorded(bound: Bound, addresses: list[int], stream: int) -> None:
        named = {name: addresses[i] + beyond for name, (i, beyond) in bound.places.items()}
        seen.append((named, stream))
        original(bound, addresses, stream)

    monkeypatch.setattr(Bound, "launch", recorded)
    return seen


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_output(
    dtype: str, causal: bool, layout: str, rng: np.random.Generator, door: Door
) -> None:
    inputs = random_inputs(rng, dtype, **SHAPE)
    if layout == "bnhd":
        inputs = {name: x.swapaxes(1, 2) for name, x in inputs.items()}
    options = {"causal": causal, "layout": layout, "scale2": 0.2}
    arrays = door.put(inputs)
    results = door.jax.jit(door.gradient(**options))(*arrays)
    Expected(inputs, options).check(door.get(results))
    assert [x.dtype.name for x in results[1]] == [dtype] * 4
    assert all(x.devices() == {door.device} for x in door.jax.tree.leaves(results))
    # Arrays with values take the same road.
    kl = door.attention_kl(*arrays[:4], **options)
    assert same_bits(np.asarray(kl), np.asarray(results[0][1][0]))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_queries": 3, "num_keys": 6000},
        {"num_queries": 300, "num_keys": 200, "head_dim1": 128},
        {"num_queries": 1000, "num_keys": 129, "head_dim1": 256},
    ],
    ids=["splits", "d128", "d256"],
)
def test_other_kernels(shape: dict[str, int], rng: np.random.Generator, door: Door) -> None:
    inputs = random_inputs(rng, **shape)
    Expected(inputs, {}).check(door.get(door.jax.jit(door.gradient())(*door.put(inputs))))


RAGGED: dict[str, dict[str, Any]] = {
    "padded": {"kv_starts": (3, 20), "kv_lens": (60, 44), "q_lens": (90, 31)},
    "packed": {"cu_seqlens_q": (0, 40, 41, 90), "cu_seqlens_k": (5, 25, 60, 70)},
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches(name: str, rng: np.random.Generator, door: Door) -> None:
    is_packed = name == "packed"
    lengths = RAGGED[name]
    inputs = random_inputs(rng, **{**SHAPE, "batch": 1 if is_packed else 2})
    if is_packed:
        starts, keys = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
        places = zip(starts, starts[1:], keys, keys[1:], strict=False)
        parts = [Part(0, slice(q, q_end), slice(k, k_end)) for q, q_end, k, k_end in places]
    else:
        places = zip(*lengths.values(), strict=True)
        parts = [
            Part(b, slice(0, rows), slice(first, first + most))
            for b, (first, most, rows) in enumerate(places)
        ]
    arrays = poison(inputs, parts, np.nan)
    arrays["dkl"] = inputs["dkl"]  # the loss is of all rows
    if is_packed:
        arrays = {n: to_packed(n, x) for n, x in arrays.items()}
    on_card = {
        n: door.jax.device_put(np.array(x, np.int32), door.device) for n, x in lengths.items()
    }
    results = door.get(door.gradient(causal=True, **on_card)(*door.put(arrays)))
    if is_packed:
        results = {n: from_packed(x) for n, x in results.items()}
    ExpectedParts(inputs, parts, {"causal": True}).check(results)


@pytest.mark.parametrize("shape", [(0, 2, 8, 8), (1, 2, 0, 8), (1, 2, 8, 0)], ids=str)
def test_nothing_to_compute(shape: tuple[int, ...], door: Door) -> None:
    batch, heads, num_queries, num_keys = shape
    ones = door.jax.numpy.ones
    q, k = (ones((batch, heads, n, 64), "bfloat16") for n in (num_queries, num_keys))

    def mean(*inputs: Any) -> Any:
        return door.attention_kl(*inputs, reduction="mean")

    kl, gradients = door.jax.value_and_grad(mean, POSITIONS)(q, k, q, k)
    assert kl == 0
    assert all(not np.asarray(gradient).any() for gradient in gradients)


@pytest.mark.parametrize(
    "wrt", [("q2",), ("k2",), ("q2", "k2"), ("q1", "k2"), ("k1",)], ids="_".join
)
def test_subsets(
    wrt: tuple[str, ...],
    rng: np.random.Generator,
    door: Door,
    addresses: list[tuple[dict[str, int], int]],
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    results = door.jax.jit(door.gradient(wrt))(*door.put(inputs))
    Expected(inputs, {}, wrt).check(door.get(results, wrt))
    written = {name for pointers, _ in addresses for name in pointers if name.startswith("d")}
    assert written == {"dkl", *("d" + name for name in wrt)}


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (0, None, 0, None, 0)], ids=["all", "queries"])
def test_vmap(axes: tuple[Any, ...], rng: np.random.Generator, door: Door) -> None:
    problems = [random_inputs(rng, **SHAPE) for _ in range(3)]
    for inputs in problems[1:]:
        inputs |= {n: problems[0][n] for n, axis in zip(INPUTS, axes, strict=False) if axis is None}
    arrays = [door.put(inputs) for inputs in problems]
    mapped = [
        arrays[0][i] if axis is None else door.jax.numpy.stack([x[i] for x in arrays])
        for i, axis in enumerate(axes)
    ]
    together = door.jax.jit(door.jax.vmap(door.gradient(causal=True), axes))(*mapped)
    for index, inputs in enumerate(problems):
        alone = door.jax.tree.map(lambda x, i=index: x[i], together)
        Expected(inputs, {"causal": True}).check(door.get(alone))


def test_only_memory_of_the_card_and_only_of_xla(
    rng: np.random.Generator, door: Door, addresses: list[tuple[dict[str, int], int]]
) -> None:
    from cupy.cuda import runtime

    # Splits and a fused dQ: both directions have a workspace.
    inputs = random_inputs(rng, num_queries=16, num_keys=4000)
    step = door.jax.jit(door.gradient())
    arrays = door.put(inputs)
    door.jax.block_until_ready(step(*arrays))
    with door.jax.transfer_guard("disallow"), Usage() as usage:
        door.jax.block_until_ready(step(*arrays))
    assert usage.peak == 0
    assert len(addresses) == 4
    for pointers, _ in addresses:
        assert "workspace" in pointers
        for name, pointer in pointers.items():
            assert runtime.pointerGetAttributes(pointer).type == CUDA_MEMORY_DEVICE, name
    # The inputs are where the caller put them, not copies.
    for pointers, _ in addresses:
        for name, array in zip(INPUTS, arrays, strict=False):
            assert pointers[name] == array.unsafe_buffer_pointer(), name


def test_it_waits_for_what_is_computed_before_and_is_waited_for(
    rng: np.random.Generator, door: Door, addresses: list[tuple[dict[str, int], int]]
) -> None:
    inputs = random_inputs(rng, **SHAPE)
    arrays = door.put(inputs)
    jnp = door.jax.numpy
    wide = door.jax.device_put(np.full((4096, 4096), 2.0**-12, np.float32), door.device)

    def late(wide: Any, *arrays: Any) -> Any:
        # The zero comes out of tens of milliseconds of products.
        product = door.jax.lax.fori_loop(0, 20, lambda _, x: x @ wide, wide)
        zero = (product[0, 0] * 0).astype("bfloat16")
        results = door.gradient()(*(x + zero for x in arrays[:4]), arrays[4])
        return results, [2 * x.astype(jnp.float32) for x in results[1]]

    results, doubled = door.jax.jit(late)(wide, *arrays)
    ours = door.get(results)
    Expected(inputs, {}).check(ours)
    for name, twice in zip(INPUTS, doubled, strict=True):
        assert np.array_equal(twice, 2 * ours["d" + name].astype(np.float32))
    assert all(stream for _, stream in addresses)


def test_many_calls_in_flight(rng: np.random.Generator, door: Door) -> None:
    problems = [random_inputs(rng, num_queries=70 + i % 3, num_keys=90) for i in range(12)]
    step = door.jax.jit(door.gradient(deterministic=True))
    # Nothing is waited for before everything has been started.
    arrays = [door.put(inputs) for inputs in problems]
    results = [step(*arrays[i % 12]) for i in range(48)]
    del arrays
    for first, inputs in enumerate(problems):
        ours = [door.get(result) for result in results[first::12]]
        Expected(inputs, {}).check(ours[0])
        for again in ours[1:]:
            assert all(same_bits(again[name], x) for name, x in ours[0].items())


def test_10000_calls_do_not_grow(rng: np.random.Generator, door: Door) -> None:
    arrays = door.put(random_inputs(rng, heads=2, num_queries=40, num_keys=40))
    step = door.jax.jit(door.gradient(("q2", "k2")))

    def usage(count: int) -> tuple[int, int]:
        for _ in range(count):
            results = step(*arrays)
        door.jax.block_until_ready(results)
        del results
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return door.device.memory_stats()["bytes_in_use"], 4096 * pages

    # Each is a forward and a backward. What leaks grows all the time; allocators take a megabyte
    # now and then.
    devices, hosts = zip(*(usage(count) for count in (1000, 1500, 1500, 1500)), strict=True)
    assert max(devices[1:]) <= devices[0]
    # 200 bytes a call would show.
    assert min(after - before for before, after in itertools.pairwise(hosts)) < 300_000


def test_everything_is_loaded_before_anything_runs(
    rng: np.random.Generator, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = door.put(random_inputs(rng, num_queries=77, num_keys=33))
    step = door.jax.jit(door.gradient()).lower(*arrays).compile()

    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was loaded in the course of a computation")

    monkeypatch.setattr(jit, "_load", refuse)
    door.jax.block_until_ready(step(*arrays))


def test_what_the_card_refuses_comes_before_any_launch(
    rng: np.random.Generator, door: Door, launched: list[tuple[str, dict[str, Any]]]
) -> None:
    def put(dtype: str, **shape: Any) -> list[Any]:
        arrays = door.put(random_inputs(rng, dtype, **shape))[:4]
        return arrays

    for call in (door.attention_kl, door.jax.jit(door.attention_kl)):
        with pytest.raises(TypeError, match="q2: expected the dtype of q1, bfloat16"):
            call(*put("bfloat16")[:2], *put("float32")[2:])
        with pytest.raises(ValueError, match="q1 and k1: expected a head dimension"):
            call(*put("bfloat16", head_dim1=12))
    assert launched == []


def test_the_second_card(rng: np.random.Generator, jax: Any) -> None:
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    from jax.sharding import PartitionSpec

    inputs = random_inputs(rng, **SHAPE)
    second = Door(jax, 1)
    results = jax.jit(second.gradient())(*second.put(inputs))
    assert all(x.devices() == {second.device} for x in jax.tree.leaves(results))
    expected = Expected(inputs, {})
    expected.check(second.get(results))

    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        second.attention_kl, mesh=mesh, in_specs=PartitionSpec("b"), out_specs=PartitionSpec("b")
    )

    def loss(q1: Any, k1: Any, q2: Any, k2: Any, dkl: Any) -> Any:
        return (dkl * sharded(q1, k1, q2, k2)).sum()

    placed = jax.device_put(
        [inputs[name] for name in (*INPUTS, "dkl")],
        jax.sharding.NamedSharding(mesh, PartitionSpec("b")),
    )
    gradients = jax.jit(jax.grad(loss, POSITIONS))(*placed)
    expected.check({"d" + n: np.asarray(x) for n, x in zip(INPUTS, gradients, strict=True)})


COMMAND_BUFFERS = """
import sys
import jax
import numpy as np
from streamkl_cupy.chain import Bound
from streamkl_cupy.jax import attention_kl
from streamkl_cupy.problem import INPUTS
from tests.gpu.card import Expected, random_inputs

launches = 0
original = Bound.launch
def launch(*arguments):
    global launches
    launches += 1
    original(*arguments)
Bound.launch = launch

def loss(q1, k1, q2, k2, dkl):
    kl = attention_kl(q1, k1, q2, k2, causal=True)
    return (dkl * kl).sum(), kl

step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
rng = np.random.default_rng(0)
device = jax.devices("gpu")[0]
shape = {"heads": 4, "num_queries": int(sys.argv[1]), "num_keys": int(sys.argv[2])}
calls = 12
for _ in range(calls):
    inputs = random_inputs(rng, **shape)
    arrays = [jax.device_put(inputs[name], device) for name in (*INPUTS, "dkl")]
    (_, kl), gradients = step(*arrays)
    ours = {"kl": kl} | {"d" + n: x for n, x in zip(INPUTS, gradients, strict=True)}
    Expected(inputs, {"causal": True}).check({n: np.asarray(x) for n, x in ours.items()})
    del arrays, kl, gradients, ours
print(launches, 2 * calls)
"""


@pytest.mark.parametrize("lengths", [("200", "300"), ("3", "6000")], ids=["plain", "splits"])
def test_command_buffers(
    lengths: tuple[str, str], jax: Any, run_python: Callable[..., Any]
) -> None:
    # XLA leaves computations of few kernels alone unless told otherwise.
    flags = "--xla_gpu_graph_min_graph_size=1"
    done = run_python("-c", COMMAND_BUFFERS, *lengths, XLA_FLAGS=flags)
    launches, without = map(int, done.stdout.split())
    assert 0 < launches < without
