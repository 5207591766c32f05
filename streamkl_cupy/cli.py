"""The command line: ``streamkl-cupy demo | info | audit | warmup | tune | cache``.

Every command computes a plain dictionary first; ``--json`` prints it, or else it becomes tables.
Exit codes: 0 fine, 1 the accuracy rule is broken, 2 it cannot be done as asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.resources
import itertools
import json
import math
import platform
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamkl_cupy import __version__, api, audit, env, jit, problem

OK, BROKEN, CANNOT = 0, 1, 2

# Mean KL(teacher || student) of the sample's last passage, computed once in float64.
SAMPLE_MEAN_KL = 2.279408821

_PACKAGES = (
    "numpy",
    "scipy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-core",
    "cuda-bindings",
    "cuda-pathfinder",
    "torch",
    "jax",
)

Payload = dict[str, Any]


class CannotError(Exception):
    """What was asked for cannot be done here; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments
        The words of the command line, by default those of the process.

    Returns
    -------
    int
        The exit code: 0 fine, 1 the accuracy rule is broken, 2 it cannot be done as asked.

    Examples
    --------
    >>> main(["demo", "--device", "gpu"])  # doctest: +SKIP
    0
    """
    options = _parser().parse_args(arguments)
    payload: Payload
    code: int
    try:
        payload, code = options.compute(options)
    except (CannotError, ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
        if env.debug():
            raise
        if options.json:
            _print_json({"error": str(error)})
        else:
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        return CANNOT
    if options.json:
        _print_json(payload)
    else:
        options.show(payload, Console())
    return code


def find_card() -> tuple[Any, str]:
    """CuPy, if it finds a card that the kernels run on.

    Returns
    -------
    tuple
        The module and the name of its current device; or None and why there is none.

    Examples
    --------
    >>> cupy, text = find_card()
    >>> bool(text)
    True
    """
    try:
        import cupy
    except (ImportError, OSError) as error:
        return None, f"CuPy cannot be imported ({error}); the extras cu12 and cu13 install it"
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"no NVIDIA card can be used ({error})"
    if num_devices == 0:
        return None, "there is no NVIDIA card"
    device = cupy.cuda.Device()
    capability = int(device.compute_capability)
    if capability < 80:
        return None, f"the kernels need sm_80 or newer, the card is sm_{capability}"
    return cupy, cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()


# ---------------------------------------------------------------------------------------- demo


def _demo(options: argparse.Namespace) -> tuple[Payload, int]:
    cupy, computed_by = _device(options.device)
    path = importlib.resources.files("streamkl_cupy") / "data" / "minilm_attention_qk.npz"
    with path.open("rb") as file, np.load(file) as sample:
        packed = {
            "q1": sample["q_teacher"],
            "k1": sample["k_teacher"],
            "q2": sample["q_student"],
            "k2": sample["k_student"],
        }
        bounds = sample["cu_seqlens"].tolist()
    passages = []
    for start, stop in itertools.pairwise(bounds):
        inputs = {name: array[:, start:stop] for name, array in packed.items()}
        shape = inputs["q1"].shape[:-1]
        # The gradient of the mean, so that norms of long and short passages compare.
        dkl = np.full(shape, 1 / math.prod(shape), np.float32)
        report = audit.measure(**inputs, dkl=dkl, wrt=("q2", "k2"), cupy=cupy)
        kl = report.outputs["kl"].astype(np.float64)
        norms = {n: _norm(report.outputs[n]) for n in ("dq2", "dk2")}
        passages.append(
            {
                "tokens": stop - start,
                "kl_per_head": kl.mean(axis=1).tolist(),
                "mean_kl": float(kl.mean()),
                "max_kl": float(kl.max()),
                "gradient_norms": norms,
                "outputs": _lines(report),
                "passes": report.passes,
            }
        )
    mean = passages[-1]["mean_kl"]
    agrees = math.isclose(mean, SAMPLE_MEAN_KL, rel_tol=1e-5)
    passes = agrees and all(passage["passes"] for passage in passages)
    payload = {
        "computed_by": computed_by,
        "dtype": str(packed["q1"].dtype),
        "passages": passages,
        "expected_mean_kl": SAMPLE_MEAN_KL,
        "passes": passes,
    }
    return payload, OK if passes else BROKEN


def _show_demo(payload: Payload, console: Console) -> None:
    passages = payload["passages"]
    console.print(
        "Attention of a sentence encoder (all-MiniLM-L6-v2) on three passages: how far layer 5, "
        "the student, is from layer 6, the teacher.\n"
        f"Computed by {payload['computed_by']}.\n",
        highlight=False,
    )
    table = Table(title="Mean KL(teacher || student) in nats")
    table.add_column("head")
    for passage in passages:
        table.add_column(f"{passage['tokens']} tokens", justify="right")
    for head in range(len(passages[0]["kl_per_head"])):
        table.add_row(str(head), *(f"{p['kl_per_head'][head]:.6f}" for p in passages))
    table.add_section()
    table.add_row("all heads", *(f"{p['mean_kl']:.6f}" for p in passages))
    table.add_row("largest row", *(f"{p['max_kl']:.6f}" for p in passages))
    table.add_section()
    for name, title in (("dq2", "norm of dq"), ("dk2", "norm of dk")):
        table.add_row(f"{title}, student", *(f"{p['gradient_norms'][name]:.3e}" for p in passages))
    console.print(table)
    table = Table(title="Error against float64 (that of the textbook float32 formula)")
    table.add_column("output")
    for passage in passages:
        table.add_column(f"{passage['tokens']} tokens", justify="right")
    for lines in zip(*(passage["outputs"] for passage in passages), strict=True):
        cells = (f"{line['error']:.1e} ({line['baseline']:.1e})" for line in lines)
        style = None if all(line["passes"] for line in lines) else "bold red"
        table.add_row(lines[0]["name"], *cells, style=style)
    console.print(table)
    mean, expected = passages[-1]["mean_kl"], payload["expected_mean_kl"]
    console.print(
        f"\nMean KL of the last passage: {mean:.9f}, in float64 {expected:.9f}. "
        + ("Everything agrees." if payload["passes"] else "[bold red]That does not agree.[/]"),
        highlight=False,
    )


# ---------------------------------------------------------------------------------------- audit


def _audit(options: argparse.Namespace) -> tuple[Payload, int]:
    cupy, computed_by = _device(options.device)
    shape = {name: value for name in _SHAPES if (value := getattr(options, name)) is not None}
    if options.npz is not None:
        if shape:
            words = ", ".join("--" + name.replace("_", "-") for name in shape)
            raise CannotError(f"{words}: --npz takes the shapes from the file; drop one of them")
        arrays = _load(options.npz)
        if options.dtype is not None:
            for name in audit.INPUTS:
                arrays[name] = arrays[name].astype(audit.DTYPES[options.dtype])
        if options.logit_scale != 1:
            for name in ("q1", "q2"):
                scaled = arrays[name].astype(np.float32) * np.float32(options.logit_scale)
                arrays[name] = scaled.astype(arrays[name].dtype)
        if "dkl" not in arrays:
            rng = np.random.default_rng(options.seed)
            arrays["dkl"] = rng.standard_normal(arrays["q1"].shape[:-1], dtype=np.float32)
    else:
        arrays = audit.random_problem(
            **shape,
            dtype=options.dtype or "bfloat16",
            layout=options.layout,
            logit_scale=options.logit_scale,
            seed=options.seed,
        )
    report = audit.measure(
        *(arrays[name] for name in (*audit.INPUTS, "dkl")),
        causal=options.causal,
        window=options.window,
        q_offset=options.q_offset,
        scale1=options.scale1,
        scale2=options.scale2,
        softcap1=options.softcap1,
        softcap2=options.softcap2,
        layout=options.layout,
        cupy=cupy,
    )
    payload = {
        "computed_by": computed_by,
        "source": str(options.npz) if options.npz else f"random, seed {options.seed}",
        "dtype": str(arrays["q1"].dtype),
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "causal": options.causal,
        "window": options.window,
        "q_offset": options.q_offset,
        "scale1": options.scale1,
        "scale2": options.scale2,
        "softcap1": options.softcap1,
        "softcap2": options.softcap2,
        "layout": options.layout,
        "outputs": _lines(report),
        "passes": report.passes,
    }
    return payload, OK if report.passes else BROKEN


def _marks(payload: Payload, *names: str) -> str:
    """What is set of some options."""
    return "".join(f", {name} {payload[name]}" for name in names if payload[name] is not None)


def _show_audit(payload: Payload, console: Console) -> None:
    shapes = "  ".join(f"{n} {tuple(s)}" for n, s in payload["shapes"].items() if n != "dkl")
    console.print(
        f"{payload['source']}: {shapes}, {payload['dtype']}, "
        f"{'causal' if payload['causal'] else 'not causal'}"
        f"{_marks(payload, 'window', 'q_offset', 'softcap1', 'softcap2')}\n"
        f"Computed by {payload['computed_by']}.\n",
        highlight=False,
        markup=False,
    )
    _show_lines(payload["outputs"], "Errors against float64", console)
    console.print(
        "\nSize: root mean square in float64; an error is relative to it, absolute where it is 0. "
        "Allowed: twice the error of the textbook float32 formula, plus a floor of 1e-6 for kl "
        "and lse, 1e-5 for gradients. "
        + ("The rule holds." if payload["passes"] else "[bold red]The rule is broken.[/]"),
        highlight=False,
    )


def _load(path: str) -> dict[str, audit.Array]:
    try:
        with zipfile.ZipFile(path), np.load(path) as file:
            arrays = {name: file[name] for name in (*audit.INPUTS, "dkl") if name in file}
            found = file.files
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CannotError(
            f"--npz: expected a file of numpy.savez, got {path} ({error}); "
            "save q1, k1, q2, k2 and, if you have it, dkl"
        ) from error
    missing = [name for name in audit.INPUTS if name not in arrays]
    if missing:
        raise CannotError(
            f"--npz: expected the arrays q1, k1, q2, k2 in {path}, got {', '.join(found)}; "
            f"add {', '.join(missing)}"
        )
    # NumPy knows no bfloat16: it writes one as two raw bytes.
    bfloat16 = audit.DTYPES["bfloat16"]
    return {
        name: array.view(bfloat16) if array.dtype == np.dtype("V2") else array
        for name, array in arrays.items()
    }


# ---------------------------------------------------------------------------------------- info


def _info(options: argparse.Namespace) -> tuple[Payload, int]:
    cupy, text = find_card()
    card: Payload | None = None
    kernels: Payload | None = None
    tuned: Payload | None = None
    if cupy is not None:
        from streamkl_cupy import choices, launch, plan

        index = cupy.cuda.Device().id
        facts = launch.device_facts(index)
        typical = _typical_problem()
        card = {
            "name": text,
            "index": index,
            "arch": facts.arch,
            "multiprocessors": facts.num_sms,
            "memory_bytes": cupy.cuda.Device(index).mem_info[1],
            "driver": _cuda_version(cupy.cuda.runtime.driverGetVersion()),
        }
        kernels = {
            "forward": plan.forward(typical, facts, force=env.force()).name,
            "backward": plan.backward(typical, facts, ("q2", "k2"), force=env.force()).name,
        }
        contents = choices.read(text, facts)
        tuned = {
            "file": None if contents.path is None else str(contents.path),
            "ignored": contents.problem or None,
            "shapes": [_tuned_entry(one) for one in contents.tuned],
        }
    try:
        nvrtc = jit.compiler_identity()
    except ImportError as error:
        nvrtc = f"none: {error}"
    payload = {
        "version": __version__,
        "card": card,
        "no_card": None if card else text,
        "kernels": kernels,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "nvrtc": nvrtc,
        "kernel_sources": jit.source_digest()[:16],
        "cache": _cache_state(),
        "tuned": tuned,
    }
    return payload, OK


def _tuned_entry(one: Any) -> Payload:
    of = one.problem_class
    heads, num_queries, num_keys = one.shape
    what = f"gradients of {' '.join(of.wrt)}" if of.wrt else "forward"
    shape = f"{of.dtype}, {heads} heads, {num_queries} x {num_keys}"
    dims = f"head dims {of.head_dim1} {of.head_dim2}"
    marks = ", causal" * of.causal + ", deterministic" * of.deterministic
    if (of.group1, of.group2) != (1, 1):
        marks += f", groups of {of.group1} and {of.group2}"
    return {"problem": f"{what}: {shape}, {dims}{marks}", "choice": _choice_text(one.choice)}


def _choice_text(choice: Any) -> str:
    tiles = [(choice.forward_kernel, choice.forward_tile), *choice.backward_tiles]
    words = [f"{kernel}{dataclasses.astuple(tile)}" for kernel, tile in tiles if tile is not None]
    words = [word for word in (choice.strategy, choice.backward_kernel) if word] + words
    if choice.num_splits is not None and choice.num_splits > 1:
        words.append(f"{choice.num_splits} splits")
    return " ".join(words)


def _show_info(payload: Payload, console: Console) -> None:
    table = Table(title=f"streamkl-cupy {payload['version']}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    card, kernels, cache = payload["card"], payload["kernels"], payload["cache"]
    if card is None:
        table.add_row("card", f"none: {payload['no_card']}")
        table.add_row("computes with", "the float64 reference on the CPU")
    else:
        table.add_row("card", f"{card['name']} (device {card['index']}, {card['arch']})")
        table.add_row(
            "", f"{card['multiprocessors']} multiprocessors, {_size(card['memory_bytes'])}"
        )
        table.add_row("driver", f"CUDA {card['driver']}")
        table.add_row("forward*", kernels["forward"])
        table.add_row("backward*", kernels["backward"])
    table.add_section()
    table.add_row("python", f"{payload['python']}, {payload['platform']}")
    for name, version in payload["packages"].items():
        table.add_row(name, version)
    table.add_row("NVRTC", payload["nvrtc"])
    table.add_row("kernel sources", payload["kernel_sources"])
    table.add_section()
    _add_cache_rows(table, cache)
    if (tuned := payload["tuned"]) is not None:
        table.add_section()
        table.add_row("tuned choices", tuned["file"] or "turned off by STREAMKL_CHOICES")
        if tuned["ignored"]:
            table.add_row("", f"ignored: {tuned['ignored']}")
        elif tuned["file"] and not tuned["shapes"]:
            table.add_row("", "none; streamkl-cupy tune measures them")
        for shape in tuned["shapes"]:
            table.add_row("", f"{shape['problem']}: {shape['choice']}")
    console.print(table, markup=False)
    if card is not None:
        console.print(f"* for {_TYPICAL}", highlight=False)


_TYPICAL = "bfloat16, 32 heads, 8192 queries and keys, head dims 128, gradients of q2 and k2"


def _typical_problem() -> problem.Problem:
    shape, strides = (32, 8192, 128), (8192 * 128, 128, 1)
    card = problem.Device("cuda", 0)
    return problem.describe(
        *(
            problem.Operand(name, shape, strides, "bfloat16", card, pointer=256)
            for name in problem.INPUTS
        )
    )


# ---------------------------------------------------------------------------------------- warmup


def _warmup(options: argparse.Namespace) -> tuple[Payload, int]:
    if options.arch is None:
        cupy, text = find_card()
        if cupy is None:
            raise CannotError(
                f"warmup: {text}; name the architecture to build for, such as --arch sm_90a"
            )
    warmed = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[kernel]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=options.json) as progress:
        for head_dim1, head_dim2 in options.head_dims:
            for dtype in options.dtypes:
                task = progress.add_task(
                    f"{head_dim1} x {head_dim2} {dtype}", total=None, kernel=""
                )

                def report(num_done: int, num_kernels: int, kernel: str, task: Any = task) -> None:
                    name = kernel.partition("<")[0]
                    progress.update(task, completed=num_done, total=num_kernels, kernel=name)

                plans = api.warmup(
                    head_dim1,
                    head_dim2,
                    dtype,
                    precision=options.precision if dtype == "float32" else None,
                    wrt=options.wrt,
                    backward=not options.forward_only,
                    unaligned=options.unaligned,
                    windowed=options.windowed,
                    ragged=options.ragged,
                    entropy=options.entropy,
                    softcap=options.softcap,
                    arch=options.arch,
                    progress=report,
                )
                warmed.append(
                    {
                        "head_dim1": head_dim1,
                        "head_dim2": head_dim2,
                        "dtype": dtype,
                        "plans": list(plans),
                    }
                )
    return {"arch": options.arch, "warmed": warmed, "cache": _cache_state()}, OK


def _show_warmup(payload: Payload, console: Console) -> None:
    table = Table(title="Ready")
    for column in ("head dims", "dtype", "plans"):
        table.add_column(column, overflow="fold")
    for item in payload["warmed"]:
        dims = f"{item['head_dim1']} x {item['head_dim2']}"
        table.add_row(dims, item["dtype"], "\n".join(item["plans"]))
    console.print(table)
    console.print(_cache_sentence(payload["cache"]), markup=False, highlight=False)


def _head_dims(word: str) -> tuple[int, int]:
    """``128`` or ``192:128``."""
    first, colon, second = word.partition(":")
    return int(first), int(second if colon else first)


# ---------------------------------------------------------------------------------------- tune


def _tune(options: argparse.Namespace) -> tuple[Payload, int]:
    cupy, card = find_card()
    if cupy is None:
        raise CannotError(f"tune: {card}; run it on the machine whose card is to be tuned")
    if env.choices() is False and not options.dry_run:
        raise CannotError(
            "tune: STREAMKL_CHOICES turns tuned choices off, so nothing can be kept; unset it, or "
            "add --dry-run"
        )
    from streamkl_cupy import choices, launch, tune

    facts = launch.device_facts(cupy.cuda.Device().id)
    tasks = _tune_tasks(options, tune.Task)
    with Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=options.json,
    ) as progress:
        line = progress.add_task("tune", total=None)
        swept = tune.tune(
            tasks,
            facts,
            seconds=options.limit,
            say=lambda text: progress.update(line, description=text),
        )
    path = None
    if not options.dry_run:
        path = choices.store(card, facts, [tasks[name].tuned(swept[name].choice) for name in tasks])
        launch.device_facts.cache_clear()
    found = [_swept(name, one) for name, one in swept.items()]
    wrong = any(one["status"] == "wrong" for task in found for one in task["tried"])
    payload = {"card": card, "tasks": found, "file": None if path is None else str(path)}
    return payload, BROKEN if wrong else OK


def _tune_tasks(options: argparse.Namespace, task: Any) -> dict[str, Any]:
    """The forward, and the gradients of each side that are asked for."""
    heads = options.num_heads
    described = problem.contiguous(
        options.dtype,
        batch=options.batch,
        num_heads=heads,
        num_key_heads1=options.num_key_heads1 or heads,
        num_key_heads2=options.num_key_heads2 or heads,
        num_queries=options.num_queries,
        num_keys=options.num_keys or options.num_queries,
        head_dim1=options.head_dim1,
        head_dim2=options.head_dim2 or options.head_dim1,
        causal=options.causal,
    )
    tasks = {"forward": task(described)}
    for side in () if options.forward_only else ("1", "2"):
        wrt = tuple(name for name in problem.check_wrt(options.wrt) if name.endswith(side))
        if wrt:
            tasks[f"gradients of {' '.join(wrt)}"] = task(described, wrt, options.deterministic)
    return tasks


def _swept(name: str, swept: Any) -> Payload:
    return {
        "task": name,
        "gain": swept.gain,
        "kept": swept.choice == swept.best.choice,
        "tried": [
            {
                "what": one.text,
                "own": one == swept.own,
                "status": one.status,
                "detail": one.detail,
                "median_ms": one.timing.median_ms if one.timing else None,
                "min_ms": one.timing.min_ms if one.timing else None,
            }
            for one in swept.tried
        ],
    }


def _show_tune(payload: Payload, console: Console) -> None:
    for task in payload["tasks"]:
        table = Table(title=f"{task['task']}, on {payload['card']}", title_justify="left")
        table.add_column("kernels and tiles", overflow="fold")
        table.add_column("ms", justify="right")
        table.add_column("fastest round", justify="right")
        table.add_column("")
        for one in task["tried"]:
            times = (one["median_ms"], one["min_ms"])
            numbers = ("-" if time is None else f"{time:.3f}" for time in times)
            mark = "the plan's own" if one["own"] else one["detail"]
            style = "bold red" if one["status"] == "wrong" else None
            if one["status"] not in ("slow", "untried"):
                table.add_row(one["what"], *numbers, mark, style=style)
        console.print(table, markup=False)
        num_slow = sum(one["status"] == "slow" for one in task["tried"])
        verdict = (
            f"the fastest is {task['gain']:.2f} times as fast as the plan's own"
            if task["kept"]
            else "the plan's own choice is as fast as any"
        )
        num_untried = sum(one["status"] == "untried" for one in task["tried"])
        untried = f", {num_untried} not reached in time" if num_untried else ""
        console.print(f"{num_slow} slower ones not shown{untried}; {verdict}.\n", highlight=False)
    kept = payload["file"]
    text = f"Kept in {kept}; every later process plans by it." if kept else "Nothing was kept."
    console.print(text, markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------- cache


def _cache_info(options: argparse.Namespace) -> tuple[Payload, int]:
    return _cache_state(), OK


def _cache_clear(options: argparse.Namespace) -> tuple[Payload, int]:
    num_removed = jit.cache_clear()
    return {"num_removed": num_removed, **_cache_state()}, OK


def _show_cache_info(payload: Payload, console: Console) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    _add_cache_rows(table, payload)
    console.print(table, markup=False)


def _show_cache_clear(payload: Payload, console: Console) -> None:
    text = f"Removed {payload['num_removed']} kernels from {payload['directory']}."
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cache_state() -> Payload:
    return {**dataclasses.asdict(info := jit.cache_info()), "directory": str(info.directory)}


def _cache_sentence(cache: Payload) -> str:
    return (
        f"{cache['directory']}: {cache['num_kernels']} kernels, {_size(cache['size_bytes'])} of at "
        f"most {_size(cache['limit_bytes'])}."
    )


def _add_cache_rows(table: Table, cache: Payload) -> None:
    table.add_row("cache", cache["directory"])
    size, limit = _size(cache["size_bytes"]), _size(cache["limit_bytes"])
    table.add_row("", f"{cache['num_kernels']} kernels, {size} of at most {limit}")


# ---------------------------------------------------------------------------------------- helpers


def _device(choice: str) -> tuple[Any, str]:
    """CuPy and a card's name, or None and words that say the CPU computes, and why."""
    if choice == "cpu":
        return None, "the float64 reference on the CPU"
    cupy, text = find_card()
    if cupy is not None:
        return cupy, text
    if choice == "gpu":
        raise CannotError(f"--device gpu: {text}; use --device cpu for the float64 reference")
    return None, f"the float64 reference on the CPU, because {text}"


def _lines(report: audit.Report) -> list[Payload]:
    return [{**dataclasses.asdict(line), "passes": line.passes} for line in report.lines]


def _show_lines(lines: list[Payload], title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("output")
    for column in ("size", "error", "textbook float32", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("")
    for line in lines:
        if not line["same_nonfinite"]:
            verdict = "[bold red]NaN or Inf in other places than float64[/]"
        else:
            verdict = "ok" if line["passes"] else "[bold red]too large[/]"
        numbers = (f"{line[name]:.1e}" for name in ("size", "error", "baseline", "limit"))
        table.add_row(line["name"], *numbers, verdict)
    console.print(table)


def _norm(x: audit.Array) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def _print_json(payload: Payload) -> None:
    print(json.dumps(_finite(payload), indent=2))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _size(num_bytes: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.1f} {unit}"
    return f"{num_bytes} bytes"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# ---------------------------------------------------------------------------------------- words

_SHAPES = (
    "batch",
    "num_heads",
    "num_key_heads1",
    "num_key_heads2",
    "num_queries",
    "num_keys",
    "head_dim1",
    "head_dim2",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamkl-cupy",
        description="KL divergence between two attention distributions, on NVIDIA GPUs.",
        epilog="Exit codes: 0 fine, 1 the accuracy rule is broken, 2 it cannot be done as asked.",
    )
    parser.add_argument("--version", action="version", version=f"streamkl-cupy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(
        name: str,
        compute: Callable[..., Any],
        show: Callable[..., Any],
        text: str,
        into: Any = None,
    ) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = (into or commands).add_parser(
            name, help=text, description=text
        )
        made.add_argument("--json", action="store_true", help="print one JSON object")
        made.set_defaults(compute=compute, show=show)
        return made

    def add_device(to: argparse.ArgumentParser) -> None:
        to.add_argument(
            "--device",
            choices=("auto", "gpu", "cpu"),
            default="auto",
            help="where to compute (default: a card if there is one)",
        )

    demo = command("demo", _demo, _show_demo, "KL and gradients of real attention, and how exact")
    add_device(demo)

    command("info", _info, _show_info, "the card, the kernels it gets, versions, the cache")

    audited = command(
        "audit",
        _audit,
        _show_audit,
        "errors against float64, beside the textbook float32 formula's",
    )
    add_device(audited)
    audited.add_argument("--npz", metavar="FILE", help="arrays q1 k1 q2 k2 and, if wanted, dkl")
    audited.add_argument(
        "--dtype",
        choices=audit.DTYPES,
        help="of the inputs (default: that of the file; bfloat16 for a random problem)",
    )
    for name in _SHAPES:
        audited.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    audited.add_argument("--causal", action="store_true", help="aligned to the bottom right")
    audited.add_argument(
        "--window",
        nargs=2,
        type=int,
        metavar=("LEFT", "RIGHT"),
        help="how many keys before and behind its place a query sees; -1 for no limit",
    )
    audited.add_argument(
        "--q-offset", type=int, metavar="N", help="place of the first query among the keys"
    )
    audited.add_argument("--layout", choices=problem.LAYOUTS, default="bhnd")
    audited.add_argument("--scale1", type=float, metavar="X", help="default: head_dim1 ** -0.5")
    audited.add_argument("--scale2", type=float, metavar="X", help="default: head_dim2 ** -0.5")
    audited.add_argument("--softcap1", type=float, metavar="X", help="bound of the logits of P1")
    audited.add_argument("--softcap2", type=float, metavar="X", help="bound of the logits of P2")
    audited.add_argument(
        "--logit-scale", type=float, default=1.0, metavar="X", help="multiplies q1 and q2"
    )
    audited.add_argument("--seed", type=int, default=0, metavar="N")

    warm = command("warmup", _warmup, _show_warmup, "compile kernels ahead")
    warm.add_argument(
        "--head-dims",
        type=_head_dims,
        nargs="+",
        default=[(128, 128)],
        metavar="D",
        help="each 128, or 192:128 where the two sides differ (default: 128)",
    )
    warm.add_argument(
        "--dtypes", nargs="+", choices=problem.GPU_DTYPES, default=["bfloat16"], metavar="DTYPE"
    )
    warm.add_argument(
        "--precision",
        choices=problem.PRECISIONS,
        help="how float32 inputs will be multiplied (default: float32)",
    )
    warm.add_argument(
        "--wrt",
        nargs="+",
        choices=problem.INPUTS,
        default=["q2", "k2"],
        metavar="INPUT",
        help="the gradients that will be asked for (default: q2 k2)",
    )
    warm.add_argument("--forward-only", action="store_true", help="no kernels of the backward")
    warm.add_argument("--unaligned", action="store_true", help="also for views off 16 bytes")
    warm.add_argument("--windowed", action="store_true", help="also for sliding windows")
    warm.add_argument(
        "--ragged", action="store_true", help="also for padded batches and packed sequences"
    )
    warm.add_argument("--entropy", action="store_true", help="also for entropies")
    warm.add_argument("--softcap", action="store_true", help="also for softcaps")
    warm.add_argument(
        "--arch", metavar="SM", help="build for this one, such as sm_90a, and load nothing"
    )

    tuned = command(
        "tune", _tune, _show_tune, "measure tiles and splits for your shapes, and keep the fastest"
    )
    tuned.add_argument("--batch", type=int, default=1, metavar="N")
    tuned.add_argument("--num-heads", type=int, default=32, metavar="N")
    tuned.add_argument("--num-queries", type=int, default=8192, metavar="N")
    tuned.add_argument("--num-keys", type=int, metavar="N", help="default: as many as queries")
    tuned.add_argument("--head-dim1", type=int, default=128, metavar="N")
    tuned.add_argument("--head-dim2", type=int, metavar="N", help="default: --head-dim1")
    for side in ("1", "2"):
        tuned.add_argument(
            f"--num-key-heads{side}", type=int, metavar="N", help="default: --num-heads"
        )
    tuned.add_argument("--dtype", choices=problem.GPU_DTYPES, default="bfloat16")
    tuned.add_argument("--causal", action="store_true", help="aligned to the bottom right")
    tuned.add_argument(
        "--wrt",
        nargs="+",
        choices=problem.INPUTS,
        default=["q2", "k2"],
        metavar="INPUT",
        help="the gradients that will be asked for (default: q2 k2)",
    )
    tuned.add_argument("--forward-only", action="store_true", help="not the backward")
    tuned.add_argument(
        "--deterministic", action="store_true", help="the backward that is the same in every run"
    )
    tuned.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for all of it, about (default: %(default)g)",
    )
    tuned.add_argument("--dry-run", action="store_true", help="only show; keep nothing")

    cached = commands.add_parser("cache", help="the compiled kernels on disk")
    actions = cached.add_subparsers(required=True, metavar="action")
    command("info", _cache_info, _show_cache_info, "where they are, how many, how large", actions)
    command("clear", _cache_clear, _show_cache_clear, "remove them", actions)
    return parser


if __name__ == "__main__":
    sys.exit(main())
