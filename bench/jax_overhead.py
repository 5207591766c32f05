"""What a call of `streamkl_cupy.jax` costs the host: ``python -m bench overhead-jax``.

Beside it stands an empty ``buffer_callback`` with the same operands and results: what JAX itself
takes to come to Python and back. A gradient is measured against two of them, with the operands of
the forward and of the backward. Between the two stands a ``buffer_callback`` that launches the same
kernel at addresses that it knows already: no call that launches it from Python can take less. Needs
JAX and a card, no PyTorch.

XLA records launches in command buffers where it finds enough of them in a row, and then no call
comes to Python any more. Both are measured, each in a process of its own, for XLA reads its flags
when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from streamkl_cupy import api, env, plan, reference
from streamkl_cupy.chain import Bound
from streamkl_cupy.problem import INPUTS, Device, Operand, describe
from streamkl_cupy.timing import measure

from .digest import ROOT
from .report import Column, Report, Row

# So small that the device does not matter.
SHAPE = (1, 4, 128, 64)
DTYPE = "bfloat16"
TOLERANCES = {"kl": 1e-4, "dq2": 1e-2, "dk2": 1e-2}
ROUNDS, ROUNDS_QUICK = 8, 3
LIMIT = 1.3
# How XLA runs the calls, and the flags that make it.
CASES = {
    "launched from Python": "--xla_gpu_enable_command_buffer=",
    "in a command buffer": "--xla_gpu_graph_min_graph_size=1",
}
COLUMNS = (
    Column("case", "case"),
    Column("contender", "call"),
    Column("status", "status"),
    Column("error", "error", ".1e"),
    Column("host_us", "host (us)", ".1f"),
    Column("synchronised_us", "to the result (us)", ".1f"),
    Column("of_peer", "of the peer's host time", ".2f"),
    Column("peer", "peer"),
)
NOTHING = "jit of nothing"
BARE = "bare launch in a buffer_callback"
# Ours, and what it may take 1.3 times the host time of.
PEERS = {
    "attention_kl under jit": "empty buffer_callback",
    "gradient under jit": "two empty buffer_callbacks",
}


def missing() -> str | None:
    """Why nothing can be measured here; None if it can."""
    # JAX would take most of the card otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError:
        return "JAX is not installed"
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX finds no NVIDIA card ({error})"
    return None


def run(*, quick: bool, say: Callable[[str], None]) -> Report:
    """Measure each case in a process of its own."""
    rows: list[Row] = []
    for case, flags in CASES.items():
        say(f"overhead-jax: {case}")
        rows += [{"case": case, **row} for row in _measured(flags, quick)]
    return Report(
        name="overhead_jax",
        title=f"Cost of a call from JAX, {'x'.join(map(str, SHAPE))} {DTYPE}",
        columns=COLUMNS,
        rows=rows,
        notes=[
            "Host: time for the call to return, many in a row. To the result: call and wait for "
            "the device. Medians; hosts differ, so compare, do not quote.",
            f"Aim: at most {LIMIT} of the peer's host time.",
            f"{BARE.capitalize()}: of the same kernel, at addresses that it need not ask for.",
        ],
    )


def _measured(flags: str, quick: bool) -> list[Row]:
    code = f"from bench.jax_overhead import child; child(quick={quick})"
    variables = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the measured process ended with {done.returncode}:\n{done.stderr}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def child(*, quick: bool) -> None:
    """Check the results, then time all calls in turns, and print the rows as JSON."""
    calls, errors = _calls()
    rows: list[Row] = []
    for name in calls:
        row: Row = {"contender": name, "ours": name in PEERS, "status": "ok"}
        if name in PEERS:
            found = errors(name)
            row |= {"errors": found, "error": max(found.values())}
            if not all(error <= TOLERANCES[output] for output, error in found.items()):
                row |= {"status": "wrong", "errors": {n: str(x) for n, x in found.items()}}
                del row["error"]
        rows.append(row)
    rounds = ROUNDS_QUICK if quick else ROUNDS
    for key, watch in (("host_us", _host_watch), ("synchronised_us", _synchronised_watch)):
        timings = measure(calls, watch, rounds=rounds)
        for row in rows:
            if row["status"] == "ok":
                row[key] = timings[row["contender"]].median_ms * 1e3
    by_name = {row["contender"]: row for row in rows}
    for name, peer in {**PEERS, BARE: PEERS["attention_kl under jit"]}.items():
        if by_name[name]["status"] == "ok":
            ratio = by_name[name]["host_us"] / by_name[peer]["host_us"]
            by_name[name] |= {"peer": peer, "of_peer": ratio}
    print(json.dumps(rows))


def _calls() -> tuple[dict[str, Callable[[], Any]], Callable[[str], dict[str, float]]]:
    """What is timed, by name, and the errors of the results of ours."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    from streamkl_cupy.jax import attention_kl

    rng = np.random.default_rng(0)
    device = jax.devices("cuda")[0]
    drawn = [rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(4)]
    inputs = [jax.device_put(jax.numpy.asarray(x, DTYPE), device) for x in drawn]
    upstream = rng.standard_normal(SHAPE[:-1], dtype=np.float32)
    dkl = jax.device_put(upstream, device)

    def shape_of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def callback(function: Callable[..., None], *results: Any) -> Any:
        return buffer_callback(function, list(results), command_buffer_compatible=True)

    def nothing(context: Any, results: Any, *operands: Any) -> None:
        pass

    def empty(*results: Any) -> Any:
        return callback(nothing, *results)

    rows = shape_of((*SHAPE[:-1], 1), np.float32)
    saved = shape_of((4, *SHAPE[:-1]), np.float32)
    gradient = shape_of(SHAPE, inputs[0].dtype)
    # The statistics of the rows, as the backward takes them.
    workspace = shape_of((16 * int(np.prod(SHAPE[:-1])),), np.uint8)

    def empty_gradient(dkl: Any, *inputs: Any) -> Any:
        kl, kept = empty(rows, saved)(*inputs)
        return empty(gradient, gradient, workspace)(dkl[..., None], *inputs, kl, kept)[:2]

    bound, kept = _bound(device.local_hardware_id)
    # Its result goes where nobody looks.
    places = [*inputs, *(jax.device_put(np.zeros(size, np.uint8), device) for size in kept)]
    addresses = [array.unsafe_buffer_pointer() for array in places]

    def launch(context: Any, results: Any, *operands: Any) -> None:
        bound.launch(addresses, context.stream)

    def loss(dkl: Any, *inputs: Any) -> Any:
        return (dkl * attention_kl(*inputs)).sum()

    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        NOTHING: (lambda *inputs: inputs[0], tuple(inputs)),
        "empty buffer_callback": (empty(rows), tuple(inputs)),
        BARE: (callback(launch, rows), tuple(inputs)),
        "attention_kl under jit": (attention_kl, tuple(inputs)),
        "two empty buffer_callbacks": (empty_gradient, (dkl, *inputs)),
        "gradient under jit": (jax.grad(loss, (3, 4)), (dkl, *inputs)),
    }
    compiled = {name: jax.jit(function) for name, (function, _) in functions.items()}
    calls = {name: _bind(compiled[name], functions[name][1]) for name in functions}
    for call in calls.values():
        jax.block_until_ready(call())

    def errors(name: str) -> dict[str, float]:
        hosts = [np.asarray(x).astype(np.float64) for x in inputs]
        state = reference.attention_kl(*hosts, return_state=True)
        got = calls[name]()
        if name == "gradient under jit":
            exact = reference.attention_kl_backward(upstream, *hosts, state)
            pairs = zip(("dq2", "dk2"), got, exact, strict=True)
        else:
            pairs = zip(("kl",), (got,), (state.kl,), strict=True)
        return {output: _error(np.asarray(x), exact) for output, x, exact in pairs}

    return calls, errors


def _bound(device_index: int) -> tuple[Bound, tuple[int, int]]:
    """The forward, to be launched at the addresses of the inputs, of kl and of a workspace.

    Beside it the bytes of the last two.
    """
    strides = tuple(int(np.prod(SHAPE[axis + 1 :])) for axis in range(len(SHAPE)))
    place = Device("cuda", device_index)
    operands = [Operand(name, SHAPE, strides, DTYPE, place, pointer=256) for name in INPUTS]
    prepared = api.prepare_forward(
        describe(*operands), device_index, env.force(), plan.current_override()
    )
    names = (*INPUTS, "kl", "workspace")
    bound = prepared.bind({name: (position, 0) for position, name in enumerate(names)})
    return bound, (4 * int(np.prod(SHAPE[:-1])), max(prepared.workspace_bytes, 1))


def _bind(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))


def _host_watch(call: Callable[[], Any], count: int) -> float:
    """Milliseconds until ``count`` calls have returned, the queue empty before."""
    import jax

    start = time.perf_counter()
    for _ in range(count):
        result = call()
    elapsed = time.perf_counter() - start
    jax.block_until_ready(result)
    return elapsed * 1e3


def _synchronised_watch(call: Callable[[], Any], count: int) -> float:
    """Milliseconds of ``count`` calls, each waited for."""
    import jax

    start = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e3
