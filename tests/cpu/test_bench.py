"""The bench without a card: what it counts, compares, refuses, writes and reads."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as command_line
from bench import bars, cases, digest, jax_overhead, peers, record, report, startup, timing
from bench.bars import Bar
from bench.contender import Entry, SkipError, Work
from bench.workloads import Workload, masks, shrunk
from streamkl_cupy.timing import MAX_CALLS, Timing, measure

ROOT = Path(__file__).resolve().parents[2]
SQUARE = Workload(32, 16384, 16384, 128, 128)


# Workloads.


def test_the_counts_are_those_of_the_formulas():
    pairs = 32 * 16384 * 16384
    assert SQUARE.forward_flops == 4 * pairs * 128
    assert SQUARE.backward_flops == 8 * pairs * 128
    assert SQUARE.attention_forward_flops == 4 * pairs * 128
    assert SQUARE.attention_backward_flops == 10 * pairs * 128
    assert SQUARE.input_bytes == 4 * 32 * 16384 * 128 * 2
    assert SQUARE.forward_bytes == SQUARE.input_bytes + 12 * 32 * 16384
    assert SQUARE.logits_bytes == 2 * 4 * pairs


def test_a_window_counts_the_pairs_of_its_mask():
    workload = Workload(3, 50, 50, 8, 8, causal=True, window=7)
    assert workload.pairs == 3 * sum(min(i + 1, 8) for i in range(50))
    assert replace(workload, window=60).pairs == 3 * 50 * 51 / 2
    packed = Workload(3, 50, 50, 8, 8, causal=True, lengths=(30, 20))
    assert packed.pairs == 3 * (30 * 30 + 20 * 20) / 2
    assert replace(packed, causal=False).pairs == 2 * packed.pairs
    with pytest.raises(ValueError, match="lengths: expected a square"):
        replace(packed, lengths=(30, 21))
    with pytest.raises(ValueError, match="window: expected a causal square"):
        replace(workload, num_keys=60)


def test_a_causal_square_counts_half():
    causal = replace(SQUARE, causal=True)
    assert causal.forward_flops == SQUARE.forward_flops / 2
    assert causal.backward_flops == SQUARE.backward_flops / 2


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 9), (3, 9), (9, 3), (7, 1)])
def test_a_causal_rectangle_counts_the_pairs_of_its_mask(num_queries, num_keys):
    workload = Workload(5, num_queries, num_keys, 8, 8, causal=True)
    visible = sum(
        j <= i + num_keys - num_queries
        for i, j in itertools.product(range(num_queries), range(num_keys))
    )
    assert workload.pairs == 5 * visible


def test_each_side_counts_with_its_own_head_dim():
    workload = Workload(2, 10, 20, 64, 128)
    pairs = 2 * 10 * 20
    assert workload.forward_flops == 2 * pairs * (64 + 128)
    assert workload.backward_flops == 2 * pairs * (64 + 128 + 2 * 128)
    assert replace(workload, setting=2).backward_flops == 2 * pairs * (64 + 128 + 2 * 64)
    assert workload.input_bytes == 2 * (10 + 20) * (64 + 128) * 2


def test_the_name_says_all_of_the_shape():
    workload = Workload(4, 10, 20, 64, 128, dtype="float16", causal=True)
    assert workload.name == "bh4_q10_k20_d64x128_fp16_causal"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads: expected a whole number from 1 up, got 0"),
        ({"dtype": "float64"}, "dtype: expected one of bfloat16, float16, float32, got 'float64'"),
        ({"setting": 3}, "setting: expected 1 .* got 3"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SQUARE, **change)


def test_masks():
    assert [w.causal for w in masks(SQUARE, "both")] == [False, True]
    assert [w.causal for w in masks(SQUARE, "causal")] == [True]
    assert [w.causal for w in masks(SQUARE, "full")] == [False]


# Digest.


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cu").write_text("one")
    (tmp_path / "sub" / "b.cuh").write_text("two")
    return tmp_path


def test_the_digest_sees_contents_and_names(tree):
    before = digest.tree_digest(tree)
    assert before == digest.tree_digest(tree)
    (tree / "a.cu").write_text("One")
    changed = digest.tree_digest(tree)
    assert changed != before
    (tree / "a.cu").rename(tree / "c.cu")
    assert digest.tree_digest(tree) not in (before, changed)


def test_the_digest_sees_text_that_moves_between_files(tree):
    before = digest.tree_digest(tree)
    (tree / "a.cu").write_text("onet")
    (tree / "sub" / "b.cuh").write_text("wo")
    assert digest.tree_digest(tree) != before


def test_the_digest_does_not_see_what_is_no_source(tree):
    before = digest.tree_digest(tree)
    (tree / "README.md").write_text("words")
    (tree / "a.pyc").write_bytes(b"\0")
    assert digest.tree_digest(tree) == before


def test_no_sources_have_no_digest(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected sources"):
        digest.tree_digest(tmp_path)


def test_the_digests_cover_the_device_and_the_host_sources():
    found = digest.digests()
    assert set(found) == {"cuda_src", "streamkl_cupy"}
    assert all(len(value) == 64 for value in found.values())
    assert len(set(found.values())) == 2


# Report.

COLUMNS = (
    report.Column("contender", "kernel"),
    report.Column("status", "status"),
    report.Column("rate", "rate", ".1f"),
)


def _report(**changes):
    rows = [
        {"contender": "forward_sm80", "status": "ok", "ours": True, "rate": 123.456},
        {"contender": "a|b", "status": "wrong", "ours": False, "errors": {"kl": "nan"}},
    ]
    fields = {"name": "forward", "title": "Forward", "columns": COLUMNS, "rows": rows}
    return report.Report(**fields | {"notes": ["A note."]} | changes)


def test_a_report_comes_back_as_it_was_written(tmp_path):
    ours = _report(environment=report.environment(commit="0123456789abcdef"), settings={"n": 1})
    path = ours.write(tmp_path)
    assert path == tmp_path / "forward.json"
    assert report.Report.read(path) == ours


def test_a_report_of_another_schema_is_refused(tmp_path):
    path = _report().write(tmp_path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"schema": 0}))
    with pytest.raises(ValueError, match="expected schema 1, got 0"):
        report.Report.read(path)


def test_the_rows_are_a_csv_too(tmp_path):
    path = _report().write(tmp_path)
    assert path.with_suffix(".csv").read_text().splitlines() == [
        "contender,status,ours,rate",
        "forward_sm80,ok,True,123.456",
        "a|b,wrong,False,",
    ]


def test_markdown(tmp_path):
    path = _report().write(tmp_path)
    assert path.with_suffix(".md").read_text().splitlines() == [
        "### Forward",
        "",
        "| kernel | status | rate |",
        "| --- | --- | --: |",
        "| forward_sm80 | ok | 123.5 |",
        "| a\\|b | wrong | - |",
        "",
        "* A note.",
    ]


def test_the_environment_names_the_code_and_the_machine():
    found = report.environment(commit="0123456789abcdef")
    assert found["commit"] == "0123456789abcdef"
    assert found["digests"] == digest.digests()
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"cupy", "numpy", "torch", "triton", "nvrtc"} <= set(found["versions"])
    text = report.provenance(found)
    assert "commit 0123456789ab" in text
    assert found["digests"]["cuda_src"][:12] in text


@pytest.mark.parametrize(
    ("status", "ours", "failed"),
    [
        ("ok", True, False),
        ("skipped", True, False),
        ("failed", False, False),
        ("failed", True, True),
        ("wrong", False, True),
        ("wrong", True, True),
    ],
)
def test_what_makes_a_run_fail(status, ours, failed):
    assert _report(rows=[{"status": status, "ours": ours}]).failed is failed


# Timing, by a stopwatch that only counts; its turns are tested in test_tune.py.


class FakeStopwatch:
    """Knows what a call takes, and notes what it was asked to time."""

    def __init__(self, each_ms):
        self.each_ms = each_ms
        self.asked = []

    def __call__(self, call, count):
        self.asked.append((call(), count))
        return self.each_ms[call()] * count


def no_pause():
    pass


def test_turns_are_stretches_of_time():
    stopwatch = FakeStopwatch({"a": 10.0, "b": 4.0, "c": 30.0})
    calls = {"a": lambda: "a", "b": lambda: "b", "c": lambda: "c"}
    timings = measure(calls, stopwatch, rounds=3, round_ms=20.0, pause=no_pause)
    assert [name for name, _ in stopwatch.asked[-9:]] == list("abcbcacab")
    assert dict(stopwatch.asked[-3:]) == {"a": 2, "b": 5, "c": 1}
    assert {name: t.median_ms for name, t in timings.items()} == {"a": 10.0, "b": 4.0, "c": 30.0}
    assert all(t.spread == 0 and len(t.rounds_ms) == 3 for t in timings.values())


def test_no_round_holds_more_calls_than_the_queue_of_the_device():
    watch = FakeStopwatch({"a": 1e-4})
    timings = measure({"a": lambda: "a"}, watch, rounds=1, pause=no_pause)
    assert timings["a"].calls_per_round == MAX_CALLS


def test_nothing_to_measure():
    assert measure({}, FakeStopwatch({})) == {}


# Bars.


def timed(**figures):
    """Entries of one measurement: work of 1e12 operations, and milliseconds a round."""
    return {name: (Work(1e12, "TFLOP/s"), Timing(tuple(ms), 1)) for name, ms in figures.items()}


def test_a_bar_is_the_median_of_the_ratios_in_each_round():
    found = timed(ours=(1.0, 2.0, 4.0), cudnn=(1.0, 1.0, 4.0))
    assert bars.reached(Bar("ours", ("cudnn",), "cuDNN"), found) == 1.0
    twice = found | {"cudnn": (Work(2e12, "TFLOP/s"), found["cudnn"][1])}
    assert bars.reached(Bar("ours", ("cudnn",), "cuDNN"), twice) == 0.5


def test_of_several_the_fastest_counts_and_a_sum_needs_all():
    found = timed(ours=(1.0, 1.0), a=(2.0, 2.0), b=(3.0, 3.0))
    assert bars.reached(Bar("ours", ("a", "b", "missing"), "both"), found) == 2.0
    assert bars.reached(Bar("ours", ("a", "b"), "both", is_sum=True), found) == 5.0
    assert bars.reached(Bar("ours", ("a", "missing"), "both", is_sum=True), found) is None
    assert bars.reached(Bar("ours", ("missing",), "none"), found) is None
    assert bars.reached(Bar("missing", ("a",), "none"), found) is None


def test_a_bar_says_whether_it_was_met():
    assert [bars.judged("x", 0.9, ratio)["met"] for ratio in (0.9, 0.89, None)] == [
        True,
        False,
        None,
    ]
    assert bars.judged("x", None, 0.1)["met"] is None
    row = {}
    bars.put(row, bars.judged("cuDNN", 0.9, 0.85))
    bars.put(row, bars.judged("Triton", None, 2.0))
    assert row["bars_text"] == "0.850 of cuDNN (bar 0.9: MISSED); 2.000 of Triton"
    assert bars.text(bars.judged("x", 1.0, None)) == "- of x (bar 1: not measured)"


def test_rates_between_square_problems():
    points = [(64, 400.0), (128, 600.0), (256, 650.0)]
    assert bars.interpolated(points, 80) == pytest.approx(450.0)
    assert bars.interpolated(points, 128) == pytest.approx(600.0)
    assert bars.interpolated(points, 200) == pytest.approx(600 + 50 * 72 / 128)
    assert bars.interpolated(points[:1], 80) is None


# Cases.

COMMANDS = {
    "forward": cases.forward(),
    "backward": cases.backward(),
    "small-q": cases.small_q(),
    "tune forward": cases.tune_forward(),
    "tune backward": cases.tune_backward(),
    "lengths": cases.lengths(),
    "ablation": cases.ablation_forward(),
    "ablation backward": cases.ablation_backward(),
    "memory": cases.memory(),
    "peers backward": cases.peers(),
}


def entries_of(spec, is_backward):
    names = set(spec.ours)
    for peer in spec.peers:
        assert peer in peers.PEERS
        names |= {e.name for e in peers.backward_entries([peer], None)} if is_backward else {peer}
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_cases_hold_together(command):
    specs = COMMANDS[command]
    assert len({spec.label for spec in specs}) == len(specs)
    assert len({(spec.workload, spec.ours) for spec in specs}) >= len(specs) - 1
    for spec in specs:
        names = entries_of(spec, "backward" in command)
        assert not spec.yardstick or spec.yardstick in names
        for bar in spec.bars:
            assert bar.entry in spec.ours
            assert set(bar.against) <= names, spec.label
    for spec in cases.quick(specs):
        assert spec.workload.num_keys <= 16384
        assert spec.workload.heads <= 64
        assert spec.bars == ()


def shares(command, against):
    """The least ratios of a command's bars, by case."""
    found = {}
    for spec in COMMANDS[command]:
        for bar in spec.bars:
            if bar.title.startswith(against):
                found.setdefault(spec.label, []).append(bar.least)
    return found


def test_the_bars_of_the_forward():
    assert shares("forward", "cuDNN") == {
        "d = 128, N = 16K, full": [0.95],
        "d = 128, N = 64K, full": [0.95],
        "d = 128, N = 16K, causal": [0.96],
        "d = 128, N = 64K, causal": [0.96],
        "d = 64, N = 16K, full": [0.80],
        "d = 256, N = 16K, full": [0.97],
        "d = 256, N = 16K, causal": [0.95],
    }
    assert list(shares("forward", "Triton").values()) == [[1.45]] * 4 + [[1.3], [1.0], [1.0]]
    longest = COMMANDS["forward"][-1].workload
    assert longest.name == "bh8_q524288_k524288_d128x128_bf16_causal"
    found = [spec for spec in COMMANDS["forward"] if spec.interpolated is not None]
    *unequal, window, packed = found
    assert [spec.workload.forward_dim for spec in unequal] == [128, 80]
    assert {spec.interpolated for spec in unequal} == {0.9}
    assert window.workload.name == "bh32_q65536_k65536_d128x128_bf16_causal_window4095"
    assert window.interpolated == 0.87
    assert packed.workload.name == "bh32_q65536_k65536_d128x128_bf16_causal_packed6"
    assert packed.interpolated == 0.9


def test_the_bars_of_the_backward():
    assert shares("backward", "cuDNN") == {
        "Setting 1, d = 128, N = 16K, full": [0.98, 0.80, 0.80],
        "Setting 1, d = 128, N = 16K, causal": [0.99, 0.80, 0.80],
        "Setting 2, d = 128, N = 16K, full": [0.96, 0.80, 0.80],
        "Setting 2, d = 128, N = 16K, causal": [0.98, 0.80, 0.80],
        "d = 64": [0.93],
    }
    assert shares("backward", "cuBLAS") == {"d = 256": [0.75]}
    assert list(shares("backward", "Triton").values()) == [[1.65], [1.65]]
    assert list(shares("backward", "torch.compile").values()) == [[1.0]] * 3
    assert list(shares("backward", "copy").values()) == [[0.65]] * 2
    found = [spec for spec in COMMANDS["backward"] if spec.interpolated is not None]
    *unequal, window, packed = found
    assert [spec.workload.backward_dim for spec in unequal] == [96, 56]
    assert (window.workload.window, window.interpolated) == (4095, 0.87)
    assert (sum(packed.workload.lengths), packed.interpolated) == (65536, 0.9)


def test_the_bars_of_few_queries():
    assert list(shares("small-q", "read").values()) == [[0.88], [0.88], [None], [0.88]]
    assert list(shares("small-q", "the best number").values()) == [[0.98]] * 6
    (grouped,) = (spec.workload for spec in COMMANDS["small-q"] if spec.workload.group > 1)
    assert (grouped.key_heads, grouped.num_keys) == (16, 131072)
    alone = replace(grouped, heads=16, group=1)
    assert grouped.forward_bytes - alone.forward_bytes == (128 - 16) * (256 * 2 + 12)


def test_lengths_go_to_512k_tokens_and_the_longest_are_brief():
    specs = COMMANDS["lengths"]
    assert [spec.workload.num_keys for spec in specs[::2]] == [4096 << n for n in range(8)]
    assert [spec.workload.causal for spec in specs] == [False, True] * 8
    assert [spec.calls for spec in specs[::2]] == [None] * 5 + [2, 2, 1]
    assert [bool(spec.peers) for spec in specs[::2]] == [True] * 6 + [False] * 2


def test_memory_is_measured_to_512k_tokens():
    specs = COMMANDS["memory"]
    longest = [spec for spec in specs if spec.workload.num_keys == 524288]
    assert [spec.ours for spec in longest] == [(cases.AUTO, cases.SEPARATE, cases.FUSED), ()]
    # Each peer comes to a length that cannot fit: both logit matrices are larger than any card.
    last = {peer: spec.workload for spec in specs for peer in spec.peers}
    assert min(last[peer].logits_bytes for peer in ("eager", "compile", "chunked")) > 2**38


def test_the_ablation_names_every_pair():
    specs = (*COMMANDS["ablation"], *COMMANDS["ablation backward"])
    pairs = {(bar.entry, *bar.against) for spec in specs for bar in spec.bars}
    assert pairs == {
        (cases.AUTO, cases.WHOLE),
        (cases.AUTO, cases.PORTABLE),
        (cases.FUSED, cases.SEPARATE),
        (cases.FUSED, cases.PORTABLE_FUSED),
        (cases.SEPARATE, cases.PORTABLE_SEPARATE),
        (cases.DETERMINISTIC, cases.AUTO),
    }
    assert all(bar.least is None for spec in specs for bar in spec.bars)


def test_the_cells_of_the_table_of_accuracy():
    cells = cases.accuracy()
    assert len(set(cells)) == len({cell.label for cell in cells}) == len(cells)
    logits = [cell for cell in cells if cell.kind == "logits"]
    assert {cell.logit_scale for cell in logits} == {1, 10, 100, 1000}
    assert {(cell.dtype, cell.head_dim) for cell in logits} == {
        *itertools.product(("bfloat16", "float16"), (64, 128, 256)),
        ("float32", 128),
    }
    near = [cell.kl for cell in cells if cell.kind == "near" and cell.headline]
    assert near == pytest.approx([10**-power for power in range(2, 9)])
    quick = cases.quick_cells(cells)
    assert {cell.kind for cell in quick} == {"logits", "near", "equal", "packed"}
    assert len(quick) < len(cells) / 2
    assert {cell.length for cell in quick} == {256}


def test_small_problems_that_are_the_same_are_one():
    quick = cases.quick(cases.lengths())
    assert len(quick) < 8
    assert {(spec.workload.causal, spec.calls is None) for spec in quick} == set(
        itertools.product((False, True), repeat=2)
    )


def test_shared_keys_need_a_divisor():
    with pytest.raises(ValueError, match="group: expected a divisor of the 32 heads, got 5"):
        replace(SQUARE, group=5)
    grouped = replace(SQUARE, group=4)
    assert grouped.name == "bh32_q16384_k16384_d128x128_bf16_group4"
    assert shrunk(grouped).heads == 32


def test_only_busy_samples_of_the_card_count():
    lines = "345, 80.5, 30, 0\n1500, 690, 60, 100\n[N/A], 1, 2, 3\n1700, 700, 62, 99\n1600,"
    assert timing.summarise_samples(lines) == {
        "sm_clock_mhz": 1600.0,
        "power_w": 695.0,
        "temperature_c": 61.0,
        "samples": 2.0,
    }
    assert timing.summarise_samples("345, 80, 30, 0\n") is None


# Peers.


def test_a_peer_whose_library_is_missing_is_skipped_by_name(monkeypatch):
    for name in ("triton", "fla"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SkipError, match=f"{name} is not installed"):
            peers.load(name)
        for entries in (
            peers.forward_entries([name], None),
            peers.backward_entries([name], None),
        ):
            assert all(entry.name.startswith(name) for entry in entries)
            with pytest.raises(SkipError, match=f"{name} is not installed"):
                entries[0].make()


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match=r"expected names out of .*triton.*, got 'tea'"):
        peers.load("tea")


# Command line.


def test_without_a_card_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_missing", lambda command: "PyTorch finds no NVIDIA card")
    assert command_line.main(["forward"]) == 2
    assert "PyTorch finds no NVIDIA card" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forward", "--peers", "triton,tea"], "got 'tea'"),
        (["forward", "--n", "0"], "expected a whole number from 1 up, got '0'"),
        (["overhead", "--causal", "both"], "invalid choice: 'both'"),
        (["accuracy", "--n", "64"], "unrecognized arguments"),
        (["tune", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command_line.parser().parse_args(arguments)
    assert message in capsys.readouterr().err


def test_every_command_takes_quick_and_out():
    tune = "tune backward"
    names = (name for name in command_line._HELP if name != "tune")
    for name in (*names, tune):
        words = [*name.split(), "--quick", "--out", "somewhere"]
        options = command_line.parser().parse_args(words)
        assert options.quick
        assert options.out == Path("somewhere")


def test_peers_can_be_none():
    assert command_line.parser().parse_args(["forward", "--peers", "none"]).peers == ()


def test_a_quick_run_does_not_replace_the_record():
    options = command_line.parser().parse_args(["forward", "--quick", "--n", "64", "--commit", "c"])
    finished = command_line.finish(_report(), options, timing.CardMonitor(), 1.5)
    assert finished.name == "forward_quick"
    assert finished.settings["n"] == 64
    assert finished.environment["commit"] == "c"


def test_startup_takes_medians_and_refuses_wrong_results(monkeypatch):
    first = iter([5.0, 0.3, 0.1, 0.2])
    errors = iter([1e-7] * 4)

    def child(variables):
        assert variables["STREAMKL_CACHE_DIR"]
        return {"error": next(errors), "import_s": 0.1, "first_s": next(first), "second_s": 1e-4}

    monkeypatch.setattr(startup, "_child", child)
    cold, warm = startup.run(warm_processes=3).rows
    assert (cold["status"], cold["first_s"]) == ("ok", 5.0)
    assert (warm["first_s"], warm["processes"]) == (0.2, 3)

    first, errors = itertools.repeat(0.1), iter([1e-7, 1e-7, math.nan])
    cold, warm = startup.run(warm_processes=2).rows
    assert cold["status"] == "ok"
    assert warm["status"] == "wrong"
    assert "first_s" not in warm


# Record of the GPU suite.

SUITE = """
import pytest

def test_one(): pass

@pytest.mark.parametrize("x", [1, 2])
def test_two(x): pass

def test_wrong(): assert 0

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.mark.xfail
def test_expected(): assert 0

@pytest.fixture
def broken(): raise RuntimeError

def test_error(broken): pass
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_record_counts_what_pytest_saw(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_a.py").write_text(SUITE)
    (tmp_path / "test_b.py").write_text("def test_only(): pass\n")
    parallel = ["-n", str(workers)] if workers else ["-p", "no:xdist"]
    command = [sys.executable, "-m", "bench.record", "--out", str(tmp_path), "--commit", "abc"]
    arguments = ["-p", "no:cacheprovider", "-q", *parallel, str(tmp_path)]
    # Nested runs must not take the options of the outer one.
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    result = subprocess.run(
        command + arguments, cwd=ROOT, capture_output=True, text=True, env=variables
    )
    assert result.returncode == 1, result.stdout + result.stderr
    found = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert found["counts"] == {"passed": 4, "failed": 1, "errors": 1, "skipped": 1, "xfailed": 1}
    counts = {Path(file).name: counts for file, counts in found["files"].items()}
    assert counts["test_b.py"] == {
        "passed": 1, "failed": 0, "errors": 0, "skipped": 0, "xfailed": 0,
    }  # fmt: skip
    names = [failure.split("/")[-1] for failure in found["failures"]]
    assert names == ["test_a.py::test_error", "test_a.py::test_wrong"]
    assert found["skips"] == {"not here": 1}
    assert found["exit_status"] == 1
    assert found["environment"]["commit"] == "abc"
    assert found["environment"]["digests"] == digest.digests()


def test_a_run_without_a_test_is_not_recorded(tmp_path, monkeypatch, capsys):
    def run(command, cwd):
        junit = next(a.split("=", 1)[1] for a in command if a.startswith("--junitxml="))
        case = '<testcase name="a" file="f.py"><skipped message="no card"/></testcase>'
        Path(junit).write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(record.subprocess, "run", run)
    assert record.main(["--out", str(tmp_path)]) == 1
    assert "no test ran" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_default_of_the_record_is_the_gpu_suite():
    junit = Path("junit.xml")
    assert "tests/gpu" in record.pytest_command(junit, ["-n", "8", "-k", "forward"])
    assert "tests/gpu" not in record.pytest_command(junit, ["tests/cpu/test_bench.py::test_masks"])


# What follows computes, on the CPU, and needs PyTorch.


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


CASES = {
    "square": Workload(2, 24, 24, 16, 16),
    "causal": Workload(2, 24, 24, 16, 16, causal=True),
    "window": Workload(2, 24, 24, 16, 16, causal=True, window=5),
    "softcap": Workload(2, 24, 20, 16, 16, causal=True, softcap=0.7),
    "packed": Workload(4, 24, 24, 16, 16, causal=True, group=2, lengths=(11, 1, 12)),
    "packed, full": Workload(2, 24, 24, 16, 16, lengths=(11, 1, 12)),
    "two head dims": Workload(1, 10, 33, 8, 24),
    "causal, rows without keys": Workload(2, 40, 17, 16, 8, causal=True),
    "setting 2": Workload(2, 20, 30, 16, 16, setting=2, causal=True),
    "shared keys": Workload(6, 20, 30, 16, 8, causal=True, group=3),
    "setting 2, rows without keys": Workload(2, 40, 17, 16, 8, setting=2, causal=True),
}


@pytest.mark.parametrize("workload", CASES.values(), ids=CASES)
def test_the_reference_of_the_bench_is_that_of_the_package(torch, workload):
    from bench.case import Case
    from streamkl_cupy import reference

    case = Case(workload, "cpu")
    arrays = [x.double().numpy() for x in case.inputs]
    mask = {n: x.numpy() if hasattr(x, "numpy") else x for n, x in case.mask.items()}
    options = {n: x for n, x in mask.items() if not n.startswith("max_")} | workload.softcaps
    state = reference.attention_kl(*arrays, **options, return_state=True)
    outputs = tuple(torch.from_numpy(x) for x in (state.kl, state.lse1, state.lse2))
    errors = case.check_forward(outputs)
    assert set(errors) == {"kl", "lse1", "lse2"}
    assert max(errors.values()) < 1e-12

    gradients = reference.attention_kl_backward(
        case.dkl.double().numpy(), *arrays, state, wrt=case.wrt, **options
    )
    errors = case.check_backward(tuple(map(torch.from_numpy, gradients)))
    assert set(errors) == {"dq", "dk"}
    assert max(errors.values()) < 1e-12


def test_the_reference_does_not_depend_on_its_blocks(torch, monkeypatch):
    from bench import case as module

    workload = Workload(2, 24, 20, 16, 16)
    whole = module.Case(workload, "cpu")
    outputs = (whole._forward_reference[0], *whole._backward_reference)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 7 * workload.num_keys)
    blocks = module.Case(workload, "cpu")
    for ours, expected in zip(
        (blocks._forward_reference[0], *blocks._backward_reference), outputs, strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["eager", "chunked"])
@pytest.mark.parametrize("case_name", ["square", "causal", "two head dims", "setting 2"])
def test_the_torch_peers_are_right(torch, monkeypatch, name, case_name):
    from bench.case import Case
    from bench.peers import torch_peers
    from bench.runner import is_right

    monkeypatch.setattr(torch_peers, "CHUNK_ROWS", 7)
    case = Case(CASES[case_name], "cpu")
    for entry in (*peers.forward_entries([name], case), *peers.backward_entries([name], case)):
        contender = entry.make()
        assert is_right(contender.check(contender.call()), contender.tolerances)


@pytest.mark.parametrize("case_name", ["square", "causal", "two head dims", "setting 2"])
def test_the_ways_through_torch_are_right(torch, case_name):
    from bench import torch_calls
    from bench.case import Case
    from bench.runner import is_right

    case = Case(CASES[case_name], "cpu")
    entries = torch_calls.entries(case, with_triton=False)
    assert len(entries) == 3
    for entry in (torch_calls.kl_entry(case), *entries):
        contender = entry.make()
        assert is_right(contender.check(contender.call()), contender.tolerances), entry.name


def test_each_call_has_a_peer_of_its_kind(torch):
    from bench import torch_calls
    from bench.case import Case
    from bench.commands import _compare_hosts

    case = Case(CASES["square"], "cpu")
    names = {entry.name for entry in torch_calls.entries(case, with_triton=True)}
    names.add(f"{torch_calls.kl_entry(case).name}: {torch_calls.kl_entry(case).make().name}")
    measured_by = torch_calls.MEASURED_BY
    assert {*measured_by, *measured_by.values()} == names
    rows = [{"contender": name, "status": "ok", "host_us": 10.0} for name in measured_by.values()]
    rows += [{"contender": name, "status": "ok", "host_us": 15.0} for name in measured_by]
    rows[-1]["status"] = "wrong"
    _compare_hosts(rows)
    compared = {row["contender"]: row["of_peer"] for row in rows if "of_peer" in row}
    assert compared == dict.fromkeys(list(measured_by)[:-1], 1.5)


def test_a_peer_that_leaves_out_rows_says_so(torch):
    from bench.case import Case

    case = Case(CASES["causal, rows without keys"], "cpu")
    for name in ("eager", "chunked"):
        with pytest.raises(SkipError, match="rows without keys"):
            peers.forward_entries([name], case)[0].make()


@pytest.fixture
def case(torch):
    from bench.case import Case

    return Case(CASES["square"], "cpu")


def _entry(case, name, spoil, **changes):
    """A right forward, spoiled."""
    from bench.peers import torch_peers

    right = torch_peers.forward("eager", case)
    contender = replace(right, name=name, call=lambda: spoil(right.call()), **changes)
    return Entry(name, lambda: contender)


def _with(outputs, index, value):
    outputs[0][index] = value
    return outputs


def _run(entries, yardstick=None, to_reach=()):
    from bench.runner import run_case

    def watch(call, count):
        call()
        return 2.0 * count

    return run_case(
        "full",
        entries,
        watch,
        rounds=2,
        yardstick=yardstick,
        to_reach=to_reach,
        pause=no_pause,
    )


def test_only_right_results_get_a_figure(case):
    def skip():
        raise SkipError("not for this")

    def fail():
        raise RuntimeError("first line\nsecond line")

    rows = _run(
        [
            _entry(case, "right", lambda outputs: outputs),
            _entry(case, "one row off", lambda outputs: _with(outputs, (1, 23), 7.0)),
            _entry(case, "one NaN", lambda outputs: _with(outputs, (0, 5), math.nan)),
            _entry(case, "nothing compared", lambda outputs: outputs, check=lambda outputs: {}),
            Entry("skips", skip),
            Entry("fails", fail),
        ]
    )
    found = {row["contender"]: row["status"] for row in rows}
    assert found == {
        "right": "ok",
        "one row off": "wrong",
        "one NaN": "wrong",
        "nothing compared": "wrong",
        "skips": "skipped",
        "fails": "failed",
    }
    for row in rows:
        timed = {"median_ms", "rate", "min_ms", "max_ms"} & set(row)
        assert bool(timed) == (row["status"] == "ok"), row
    assert rows[2]["errors"]["kl"] == "nan"
    assert rows[4]["detail"] == "not for this"
    assert rows[5]["detail"] == "RuntimeError: first line"
    json.dumps(rows, allow_nan=False)


def test_a_nan_outside_of_the_sample_is_wrong_too(torch):
    from bench.case import Case

    case = Case(Workload(4, 700, 8, 8, 8), "cpu")
    outside = next(i for i in range(700) if i not in set(case.rows.tolist()))
    for head, row in ((0, outside), (2, 0)):
        kl = torch.zeros(4, 700)
        assert math.isfinite(case.check_forward((kl,))["kl"])
        kl[head, row] = math.nan
        assert math.isnan(case.check_forward((kl,))["kl"])


def test_rates_and_ratios(case):
    half = Work(case.forward_work.amount / 2, "TFLOP/s")
    rows = _run(
        [
            _entry(case, "ours", lambda outputs: outputs),
            _entry(case, "stick", lambda outputs: outputs, work=half),
            _entry(case, "bytes", lambda outputs: outputs, work=Work(1e12, "TB/s")),
        ],
        yardstick="stick",
    )
    ours, stick, other = rows
    assert ours["rate"] == pytest.approx(case.workload.forward_flops / 2e-3 / 1e12)
    assert (ours["ratio"], stick["ratio"]) == (pytest.approx(2.0), 1.0)
    assert other["rate"] == pytest.approx(1e12 / 2e-3 / 1e12)
    assert "ratio" not in other


def test_the_unit_of_a_case_decides_what_a_forward_counts(torch):
    from bench.case import Case

    workload = CASES["square"]
    assert Case(workload, "cpu").forward_work == Work(workload.forward_flops, "TFLOP/s")
    by_bytes = Case(workload, "cpu", unit="TB/s").forward_work
    assert by_bytes == Work(workload.forward_bytes, "TB/s")


def test_kept_distributions_give_the_right_gradients(torch, monkeypatch):
    from bench.case import Case
    from bench.runner import is_right

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (entry,) = peers.backward_entries(["kept"], Case(CASES["square"], "cpu"))
    contender = entry.make()
    assert is_right(contender.check(contender.call()), contender.tolerances)
    for name in ("causal", "setting 2", "shared keys"):
        (entry,) = peers.backward_entries(["kept"], Case(CASES[name], "cpu"))
        with pytest.raises(SkipError):
            entry.make()


def test_bars_come_with_the_rows(case):
    half = Work(case.forward_work.amount / 2, "TFLOP/s")
    to_reach = [Bar("ours", ("stick",), "stick", 2.5), Bar("ours", ("wrong",), "wrong", 1.0)]
    rows = _run(
        [
            _entry(case, "ours", lambda outputs: outputs),
            _entry(case, "stick", lambda outputs: outputs, work=half),
            _entry(case, "wrong", lambda outputs: _with(outputs, (0, 0), 7.0)),
        ],
        to_reach=to_reach,
    )
    assert rows[0]["bars"] == [
        {"against": "stick", "least": 2.5, "reached": pytest.approx(2.0), "met": False},
        {"against": "wrong", "least": 1.0, "reached": None, "met": None},
    ]
    assert "bars" not in rows[1]


def _options(*words):
    return command_line.parser().parse_args(words)


def _chosen(*words):
    from bench import commands

    custom = (("ours",), ("cudnn",), "cudnn")
    return commands._specs(_options(*words), cases.forward(), SQUARE, *custom)


def test_options_choose_among_the_cases(torch):
    assert _chosen("forward") == cases.forward()
    causal = _chosen("forward", "--causal", "causal")
    assert len(causal) == 6
    assert all(spec.workload.causal for spec in causal)
    assert _chosen("forward", "--quick") == cases.quick(cases.forward())
    (spec,) = _chosen("forward", "--d", "96", "--causal", "full")
    assert spec.workload == replace(SQUARE, head_dim1=96, head_dim2=96)
    assert (spec.peers, spec.bars) == (("cudnn",), ())
    alone = _chosen("forward", "--peers", "cudnn")
    assert {spec.peers for spec in alone} == {("cudnn",)}
    assert {bar.title for spec in alone for bar in spec.bars} == {"cuDNN attention"}
    from bench import commands

    options = _options("backward", "--peers", "triton")
    chosen = commands._specs(options, cases.backward(), SQUARE, (), (), "")
    assert {bar.title for spec in chosen for bar in spec.bars} == {"Triton"}
    options = _options("lengths", "--peers", "triton,eager")
    lengths = commands._specs(options, cases.lengths(), SQUARE, (), (), "")
    assert [spec.peers for spec in lengths[::2]] == [
        *[("triton", "eager")] * 5,
        *[("triton",), (), ()],
    ]
    options = _options("ablation", "--peers", "none")
    own = commands._specs(options, cases.ablation_backward(), SQUARE, (), (), "")
    assert [spec.bars for spec in own] == [spec.bars for spec in cases.ablation_backward()]


def test_problems_with_two_head_dims_are_held_against_square_ones(torch):
    from bench import commands

    rates = {"d = 128, N = 16K, full": 600.0, "d = 64, N = 16K, full": 400.0}
    rates |= {"d1 = 192, d2 = 64": 540.0, "d1 = 128, d2 = 32": 404.0}
    rates |= {"d = 128, N = 64K, causal": 580.0, "d = 128, N = 64K, window of 4K": 551.0}
    rates |= {"d = 128, 6 packed sequences of 2K to 24K, causal": 493.0}
    # Other lengths and masks do not count.
    rates |= dict.fromkeys(("d = 128, N = 64K, full", "d = 256, N = 16K, causal"), 1e6)
    specs = cases.forward()
    rows = [{"case": spec.label, "entry": "ours", "rate": rates.get(spec.label)} for spec in specs]
    commands._interpolate(specs, rows, lambda shape: shape.forward_dim)
    found = {row["case"]: row["bars"][0] for row in rows if "bars" in row}
    assert {label: (bar["reached"], bar["met"]) for label, bar in found.items()} == {
        "d1 = 192, d2 = 64": (pytest.approx(0.9), True),
        "d1 = 128, d2 = 32": (pytest.approx(404 / 450), False),
        "d = 128, N = 64K, window of 4K": (pytest.approx(0.95), True),
        "d = 128, 6 packed sequences of 2K to 24K, causal": (pytest.approx(0.85), False),
    }


def test_a_bar_beside_the_splits_is_one_beside_each(torch):
    from bench import commands

    bar = Bar("ours", ("ours, no split", cases.SPLITS), "others")
    names = ("ours", "ours, no split", "ours, 2 splits", "ours, 9 splits")
    assert commands._expanded(bar, names).against == names[1:]


def test_the_table_of_a_sweep(torch):
    from bench import tuning
    from streamkl_cupy import plan, tune

    spec = cases.tune_forward()[0]
    task = tuning.task_of(spec, "forward")
    (pair,) = [spec for spec in cases.tune_backward() if spec.ours == (cases.DETERMINISTIC,)]
    assert tuning.task_of(pair, "backward").deterministic
    assert tuning.task_of(cases.tune_backward()[2], "backward").wrt == ("q1", "k1")

    (own_plan, own_choice), (plan_, choice), *_ = task.candidates(
        plan.device_facts("sm_90a")
    ).items()
    own = tune.Tried(own_plan, own_choice, "ok", timing=Timing((2.2, 2.2), 1))
    best = tune.Tried(plan_, choice, "ok", timing=Timing((2.0, 2.0), 1))
    wrong = tune.Tried(plan_, choice, "wrong", "errors")
    refused = tune.Tried(plan_, choice, "refused", "8 bytes of spills")
    slow = tune.Tried(plan_, choice, "slow")
    swept = tune.Swept(own, best, (best, own, wrong, refused, slow), 1.1)
    rows = tuning.rows_of("case", swept)
    assert [(row["mark"], row["status"]) for row in rows] == [
        ("best", "ok"),
        ("plan", "ok"),
        ("", "wrong"),
        ("", "skipped"),
    ]
    assert rows[1]["behind"] == pytest.approx(1.1)
    assert "takes 1.100 times the best, beyond the noise. 1 slower" in tuning.note_of("c", swept)
    same = replace(swept, best=own, gain=1.0)
    assert "the plan's choice is the best" in tuning.note_of("c", same)
    made = report.Report("tune_forward", "Title", tuning.COLUMNS, rows)
    assert made.failed
    assert "1.100" in made.markdown()


def test_overhead_jax_measures_each_case_in_a_process_with_its_flags(monkeypatch):
    seen = []

    def run(arguments, *, env, **_):
        seen.append((arguments[-1], env["XLA_FLAGS"]))
        row = {"contender": "attention_kl under jit", "ours": True, "status": "ok", "host_us": 1.0}
        return subprocess.CompletedProcess(arguments, 0, f"noise\n{json.dumps([row])}\n", "")

    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setattr(jax_overhead.subprocess, "run", run)
    report = jax_overhead.run(quick=True, say=lambda text: None)
    assert [row["case"] for row in report.rows] == list(jax_overhead.CASES)
    assert [flags for _, flags in seen] == [f"--mine {x}" for x in jax_overhead.CASES.values()]
    assert all(code.endswith("child(quick=True)") for code, _ in seen)
    assert not report.failed


def test_overhead_jax_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(jax_overhead, "missing", lambda: "JAX is not installed")
    assert command_line.main(["overhead-jax"]) == 2
    assert "nothing can be measured here: JAX is not installed" in capsys.readouterr().err


def test_confirmed_statistics_give_the_same_reference_of_dk(torch):
    from bench.case import Case
    from streamkl_cupy import reference

    for name in ("causal", "setting 2", "shared keys", "setting 2, rows without keys"):
        case = Case(CASES[name], "cpu")
        arrays = [x.double().numpy() for x in case.inputs]
        causal = case.workload.causal
        state = reference.attention_kl(*arrays, causal=causal, return_state=True)
        whole = case._backward_reference
        tensors = state._replace(**{n: torch.from_numpy(x) for n, x in state._asdict().items()})
        _, dk = case.changed(state=tensors)._backward_reference
        torch.testing.assert_close(dk, whole[1], rtol=1e-10, atol=1e-12)
    wrong = case.changed(state=tensors._replace(lse2=tensors.lse2 + 1))._backward_reference
    assert not torch.allclose(wrong[1], whole[1])


def test_a_changed_case_forgets_its_reference(torch, case):
    before = case._backward_reference[0]
    other = case.changed(dkl=2 * case.dkl)
    torch.testing.assert_close(other._backward_reference[0], 2 * before)
    assert case._backward_reference[0] is before


def test_the_shapes_of_the_outputs_are_known_before_a_call(case):
    for direction, entries in (
        ("forward", peers.forward_entries(["eager"], case)),
        ("backward", peers.backward_entries(["eager"], case)),
    ):
        outputs = entries[0].make().call()
        assert [(x.shape, x.dtype) for x in outputs] == list(case.output_shapes(direction))


def test_calls_that_take_seconds_are_timed_and_checked_at_once(case):
    from bench.runner import run_brief

    asked = []

    def watch(call, count):
        asked.append(count)
        call()
        return 3000.0 + len(asked)

    def spoiled(outputs):
        return _with(outputs, (1, 23), 7.0)

    entries = [
        _entry(case, "right", lambda outputs: outputs),
        _entry(case, "wrong", spoiled),
        Entry("fails", lambda: 1 / 0),
    ]
    rows = run_brief("long", entries, watch, case.output_shapes("forward"), calls=2)
    assert asked == [1] * 4
    assert [row["status"] for row in rows] == ["ok", "wrong", "failed"]
    assert (rows[0]["case"], rows[0]["median_ms"], rows[0]["rounds"]) == ("long", 3001.5, 2)
    assert not {"median_ms", "rate"} & (rows[1].keys() | rows[2].keys())


FLA = """
import torch

class FusedKLDivLoss(torch.nn.Module):
    def forward(self, x, target_x, weight, target_weight):
        student = (x @ weight.mT).float().log_softmax(-1)
        teacher = (target_x @ target_weight.mT).float().log_softmax(-1)
        return (teacher.exp() * (teacher - student)).sum(-1).mean()
"""


@pytest.fixture
def fla(torch, tmp_path, monkeypatch):
    """A library of that name with a loss that is called as the real one is."""
    (tmp_path / "fla" / "modules").mkdir(parents=True)
    for folder in ("fla", "fla/modules"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "fla" / "modules" / "fused_kl_div.py").write_text(FLA)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]
    sys.modules.pop("bench.peers.fla_peer", None)


@pytest.mark.usefixtures("fla")
def test_the_peer_of_one_mean_a_head_is_checked_as_such(torch):
    from bench.case import Case
    from bench.runner import is_right

    case = Case(Workload(3, 20, 33, 16, 32), "cpu")
    for make in (peers.forward_entries, peers.backward_entries):
        (entry,) = make(["fla"], case)
        contender = entry.make()
        outputs = contender.call()
        assert is_right(contender.check(outputs), contender.tolerances), entry
        off = (outputs[0] * 1.1, *outputs[1:])
        assert not is_right(contender.check(off), contender.tolerances)
    for name in ("causal", "shared keys"):
        with pytest.raises(SkipError):
            peers.forward_entries(["fla"], Case(CASES[name], "cpu"))[0].make()
    (entry,) = peers.backward_entries(["fla"], Case(replace(case.workload, setting=2), "cpu"))
    with pytest.raises(SkipError, match="gradient of the first side"):
        entry.make()


# Accuracy.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("scale", "bound"), [(1.0, None), (100.0, None), (10.0, 8.0)])
def test_the_textbook_on_the_device_is_that_of_the_audit(torch, monkeypatch, dtype, scale, bound):
    from bench import accuracy, textbook
    from streamkl_cupy import audit, reference

    monkeypatch.setattr(textbook, "_BLOCK_ELEMENTS", 1 << 12)
    cell = cases.Cell("logits", dtype, 32, 70, scale, softcap=bound)
    problem = accuracy.Problem.of(cell, "cpu")
    softcaps = {"softcap1": bound, "softcap2": bound}
    case = problem.cases[0]
    arrays = [x.float().numpy().astype(audit.DTYPES[dtype]) for x in case.inputs]
    dkl = case.dkl.numpy()
    state = reference.attention_kl(*arrays, **softcaps, return_state=True)
    inputs = ("q1", "k1", "q2", "k2")
    of_inputs = {"wrt": inputs, **softcaps}
    exact = [*state, *reference.attention_kl_backward(dkl, *arrays, state, **of_inputs)]
    theirs = [
        *audit.baseline_forward(*arrays, **softcaps),
        *audit.baseline_backward(dkl, *arrays, **of_inputs),
    ]
    ours = {kind: problem.solve(exact=kind) for kind in (True, False)}
    assert tuple(ours[True]) == tuple(ours[False])
    assert set(ours[True]) == set(textbook.OUTPUTS)
    for name, reference_, baseline in zip(
        ("kl", "lse1", "lse2", *("d" + name for name in inputs)), exact, theirs, strict=True
    ):
        wanted = torch.from_numpy(reference_)
        assert textbook.error(ours[True][name], wanted) < 1e-12, name
        here = textbook.error(ours[False][name], wanted)
        assert here == pytest.approx(audit.error(baseline, reference_), rel=0.5, abs=1e-7), name
        assert 0 < here < 0.1


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_no_size_of_the_logits_leaves_the_range_of_float16(torch, scale):
    from bench import accuracy

    solution = accuracy.Problem.of(cases.Cell("logits", "float16", 64, 512, scale), "cpu").solve
    for name, x in solution(exact=True).items():
        assert 1e-2 < float(x.abs().max()) < 32768 or not name.startswith("d"), name
    assert all(bool(x.isfinite().all()) for x in solution(exact=False).values())


def test_rounding_on_the_device_is_that_of_the_audit(torch):
    import numpy as np

    from bench import textbook
    from streamkl_cupy import audit

    x = torch.randn(1000) * torch.logspace(-44, 38, 1000)
    x[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    for dtype in ("bfloat16", "float16"):
        ours = textbook.round_mantissa(x, getattr(torch, dtype)).numpy()
        theirs = audit._round_mantissa(x.numpy(), np.dtype(audit.DTYPES[dtype]))
        np.testing.assert_array_equal(ours, theirs)
    assert textbook.round_mantissa(x, torch.float32) is x


def test_the_error_on_the_device_is_that_of_the_audit(torch):
    from bench import textbook
    from streamkl_cupy import audit

    for ours, reference in (
        ([3.0, 4.5], [3.0, 4.0]),
        ([0.0, 0.25], [0.0, 0.0]),
        ([math.nan, 1.0], [1.0, 1.0]),
        ([7.0, 1.5], [-math.inf, 1.0]),
    ):
        expected = torch.tensor(reference, dtype=torch.float64)
        assert textbook.error(torch.tensor(ours), expected) == audit.error(ours, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kl", [1e-2, 1e-5, 1e-8])
def test_near_sides_are_as_near_as_wanted(torch, dtype, kl):
    from bench import accuracy

    problem = accuracy.Problem.of(cases.Cell("near", dtype, 64, 512, kl=kl), "cpu")
    first, second = problem.cases
    assert torch.equal(first.q1, first.q2)
    assert first.k2.dtype == first.k1.dtype
    found = float(problem.solve(exact=True)["kl"].mean())
    # A few dozen elements move for the nearest, and the largest of them count most.
    assert kl / 3 < found < 3 * kl
    assert (second.workload.setting, second.k2 is first.k2) == (2, True)


def test_packed_sequences_are_solved_one_by_one(torch, monkeypatch):
    import numpy as np

    from bench import accuracy
    from streamkl_cupy import reference

    problem = accuracy.Problem.of(cases.Cell("packed", "bfloat16", 16, 40), "cpu")
    case = problem.cases[0]
    assert case.workload.lengths == (20, 5, 1, 14)
    arrays = [x.double().numpy() for x in case.inputs]
    ends = {name: case.mask[name].numpy() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    state = reference.attention_kl(*arrays, **ends, return_state=True)
    found = problem.solve(exact=True)
    np.testing.assert_allclose(found["kl"], state.kl, rtol=1e-12, atol=1e-14)
    wrt = ("q1", "k1", "q2", "k2")
    exact = reference.attention_kl_backward(
        case.dkl.double().numpy(), *arrays, state, wrt=wrt, **ends
    )
    for name, gradient in zip(wrt, exact, strict=True):
        np.testing.assert_allclose(
            found["d" + name], gradient.swapaxes(0, 1), rtol=1e-9, atol=1e-14
        )
    monkeypatch.setattr(accuracy, "_ours", _solved_by_the_reference)
    *own, peer = accuracy.rows_of(problem, ("eager",))
    assert [row["status"] for row in own] == ["ok"] * 3
    assert (peer["status"], peer["detail"]) == ("skipped", "it takes no packed sequences here")


def _solved_by_the_reference(problem, *, deterministic):
    return problem.solve(exact=True), f"deterministic={deterministic}"


def test_the_table_of_accuracy(torch, monkeypatch):
    from bench import accuracy

    monkeypatch.setattr(accuracy, "_ours", _solved_by_the_reference)
    monkeypatch.setitem(sys.modules, "triton", None)
    cells = (
        cases.Cell("logits", "bfloat16", 16, 40, 10.0),
        cases.Cell("near", "float16", 16, 40, kl=1e-6),
        cases.Cell("equal", "float16", 16, 40),
    )
    rows = []
    for cell in cells:
        problem = accuracy.Problem.of(cell, "cpu")
        found = accuracy.rows_of(problem, ("triton", "eager", "fla"))
        assert [row["status"] for row in found] == ["ok", "ok", "ok", "skipped", "ok", "skipped"]
        ours, _, textbook, triton, eager, fla = found
        assert max(ours[name] for name in accuracy.OUTPUTS) == 0
        assert textbook["rule"] == "holds"
        assert triton["detail"] == "triton is not installed"
        assert "every row" in fla["detail"]
        assert (textbook["kl"] > 0, eager["true_kl"] > 0) == (cell.kind != "equal",) * 2
        rows += found
    made = report.Report("accuracy", "Title", accuracy.COLUMNS, rows)
    assert not made.failed
    assert "| holds |" in made.markdown()
    (note,) = accuracy.floors(rows)
    assert note.startswith("Floor of kl between near sides, float16, absolute: ours 0.0e+00 to")


def test_the_table_of_features(torch, monkeypatch):
    from bench import features

    monkeypatch.setattr(features, "SMALL", (2, 96))
    cpu = torch.device("cpu")
    assert len({feature.label for feature in features.FEATURES}) == len(features.FEATURES)
    for feature in features.FEATURES:
        row = features.errors_of(feature, cpu)
        assert row["status"] == "ok", row
        assert row["rule"] == ("holds" if feature.has_rule else "none")
        # On the CPU kl and the log-sum-exps are the float64 reference's.
        assert max(row[name] for name in ("kl", "lse1", "lse2")) < 1e-14
        assert ("entropy" in row) == (feature.label == "entropies")


@pytest.mark.parametrize("name", ["kl", "lse2", "dk1"])
def test_a_feature_that_breaks_the_rule_is_wrong(torch, monkeypatch, name):
    from bench import features

    monkeypatch.setattr(features, "SMALL", (2, 96))
    monkeypatch.setattr(
        features.Problem,
        "outputs",
        lambda problem, **choices: (
            problem.solve(exact=True) | {name: problem.solve(exact=True)[name] * 1.02}
        ),
    )
    row = features.errors_of(features.FEATURES[1], torch.device("cpu"))
    assert (row["status"], row["rule"]) == ("wrong", f"broken: {name}")


def test_an_output_that_breaks_the_rule_fails_the_run_if_it_is_ours(torch, monkeypatch):
    from bench import accuracy

    def spoiled(problem, *, deterministic):
        solution = problem.solve(exact=True)
        if not deterministic:
            solution["dk1"][0, 3] *= 2
        solution["lse2"][1, 5] = math.nan
        return solution, ""

    monkeypatch.setattr(accuracy, "_ours", spoiled)
    problem = accuracy.Problem.of(cases.Cell("logits", "bfloat16", 16, 40), "cpu")
    ours, deterministic, *_ = rows = accuracy.rows_of(problem, ())
    assert (ours["status"], ours["rule"]) == ("wrong", "broken: lse2, dk1")
    assert (deterministic["status"], deterministic["rule"]) == ("wrong", "broken: lse2")
    assert (ours["lse2"], ours["errors"]["lse2"]) == (None, "inf")
    json.dumps(rows, allow_nan=False)
    assert report.Report("accuracy", "Title", accuracy.COLUMNS, rows).failed


def test_equal_sides_must_be_exactly_0(torch):
    from bench import accuracy

    equal, near = cases.Cell("equal", "float16", 16, 8), cases.Cell("near", "float16", 16, 8, kl=1)
    allowed = accuracy.limits(equal, dict.fromkeys(accuracy.OUTPUTS, 0.0))
    assert (allowed["kl"], allowed["dq1"]) == (1e-6, 1e-5)
    errors = dict.fromkeys(accuracy.OUTPUTS, 1e-9)
    assert accuracy.breaches(equal, errors, allowed) == ("kl",)
    assert accuracy.breaches(near, errors, allowed) == ()
    assert accuracy.breaches(equal, errors | {"kl": 0.0}, allowed) == ()


def test_large_logits_are_allowed_more(torch):
    from bench import accuracy

    baseline = {"kl": 1e-3}
    for scale, limit in ((100.0, 2e-3), (1000.0, 8e-3)):
        cell = cases.Cell("logits", "float16", 16, 8, scale)
        assert accuracy.limits(cell, baseline)["kl"] == pytest.approx(limit + 1e-6)


# Memory.


def test_who_ran_out_of_memory_is_done_with(torch):
    from bench import memory

    rows = [
        {"case": "N = 1K", "direction": "forward", "entry": "eager", "contender": "torch eager"},
        {"case": "N = 2K", "direction": "forward", "entry": "eager", "contender": "torch eager"},
        {"case": "N = 4K", "direction": "forward", "entry": "eager", "contender": "torch eager"},
    ]
    rows[1]["detail"] = "out of memory"
    rows[2]["detail"] = "out of memory at N = 2K"
    assert memory.stopped_at(rows, "forward", "eager") == "N = 2K"
    assert memory.stopped_at(rows, "backward", "eager") is None
    assert memory.stopped_at(rows[:1], "forward", "eager") is None
    assert memory.stops(rows) == ["Forward, torch eager: out of memory at N = 2K."]


def test_the_table_of_memory(torch, monkeypatch):
    from bench import memory
    from bench.case import Case

    asked = []

    def measured(case, entry, direction, *, is_warm):
        asked.append((case.workload.num_keys, direction, entry.name, is_warm, case.state))
        row = {"contender": entry.name, "entry": entry.name, "ours": entry.ours, "status": "ok"}
        if entry.name == "eager" and case.workload.num_keys == 2048:
            return row | {"status": "skipped", "detail": memory.OUT_OF_MEMORY}
        return row | {"extra_bytes": 80 if direction == "forward" else 100}

    monkeypatch.setattr(memory, "Case", lambda workload: Case(workload, "cpu"))
    monkeypatch.setattr(memory, "_measured", measured)
    monkeypatch.setattr(memory, "formula", lambda case, entry, direction: 80)
    monkeypatch.setattr(memory.ours, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(memory.ours, "forward_state", lambda case: "state")
    paths = (cases.AUTO, cases.SEPARATE, cases.FUSED)
    specs = [
        cases.Spec(f"N = {n}", Workload(1, n, n, 8, 8), paths, ("eager",), calls=calls)
        for n, calls in ((1024, None), (2048, None), (4096, 1))
    ]
    made = memory.run(specs, lambda text: None)
    rows = {(row["case"], row["direction"], row["entry"]): row for row in made.rows}
    assert len(made.rows) == len(rows) == 3 * (2 + 3)
    assert rows["N = 1024", "forward", "ours"]["bars"][0]["met"] is True
    assert rows["N = 1024", "backward", "ours, fused"]["bars"][0]["met"] is False
    assert rows["N = 1024", "forward", "eager"].get("formula_bytes") is None
    last = rows["N = 4096", "forward", "eager"]
    assert (last["status"], last["detail"]) == ("skipped", "out of memory at N = 2048")
    assert asked[-3:] == [
        (4096, "forward", "ours", False, None),
        (4096, "backward", "ours, separate", False, "state"),
        (4096, "backward", "ours, fused", False, "state"),
    ]
    assert asked[0][3:] == (True, None)
    assert made.notes[2:] == [
        "Forward, eager: out of memory at N = 2048.",
        "Backward, eager: out of memory at N = 2048.",
    ]


# Commands of both directions.


def test_brief_cases_are_named_with_their_calls(torch):
    from bench import commands

    notes = commands._brief_notes(cases.lengths())
    assert [note.split(":")[0] for note in notes] == [
        "Without rounds, median of 2 timed calls each, the last of which was checked",
        "Without rounds, median of 1 timed call each, the last of which was checked",
    ]
    assert "N = 256K, causal" in notes[0]
    assert notes[1].count("512K") == 2


def test_a_case_of_both_directions_is_drawn_once(torch, monkeypatch):
    from bench import commands
    from bench.case import Case

    drawn, asked = [], []

    def draw(workload, unit):
        drawn.append(workload)
        return Case(workload, "cpu", unit=unit)

    def timed(spec, entries, options, say, *, case, direction):
        names = tuple(entry.name for entry in entries)
        asked.append((spec.label, names, case.state))
        row = {"workload": spec.workload.name, "direction": direction, "ours": True}
        return [row | {"status": "wrong" if "c" in spec.label[-1] else "ok", "case": spec.label}]

    monkeypatch.setattr(commands, "Case", draw)
    monkeypatch.setattr(commands, "_timed", timed)
    monkeypatch.setattr(commands.ours, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(commands.ours, "forward_state", lambda case: "state")
    specs = (
        cases.Spec("a", CASES["square"], ("ours",), ("eager", "kept")),
        cases.Spec("b", CASES["causal"], ("ours",), calls=2),
        # Whose forward is wrong: there is nothing to hold its backward against.
        cases.Spec("c", CASES["two head dims"], ("ours",), calls=2),
    )
    made = commands._both_directions(
        "lengths", "Title", specs, specs, _options("lengths"), lambda text: None
    )
    assert drawn == [spec.workload for spec in specs]
    assert asked == [
        ("forward, a", ("ours", "eager"), None),
        ("backward, a", ("ours", "eager", "kept"), None),
        ("forward, b", ("ours",), None),
        ("backward, b", ("ours",), "state"),
        ("forward, c", ("ours",), None),
    ]
    assert [row["direction"] for row in made.rows] == ["forward"] * 3 + ["backward"] * 2


def test_the_entries_of_the_ablation(torch):
    from bench import commands
    from bench.case import Case

    case = Case(CASES["square"], "cpu")
    for spec in cases.ablation_backward():
        assert tuple(e.name for e in commands._backward_entries(case, spec)) == spec.ours


# Published figures.


def test_the_published_figures_are_those_of_the_paper():
    from bench import published

    rates = {figure.label: figure.rate for figure in published.FIGURES}
    assert len(rates) == len(published.FIGURES)
    assert rates["forward, BH = 32, N = 64K, full"] == pytest.approx(305, abs=1)
    assert rates["forward, BH = 32, N = 16K, full"] == pytest.approx(338, abs=1)
    assert rates["backward, Setting 1, BH = 32, N = 64K, full"] == pytest.approx(275, abs=1)
    assert rates["forward, BH = 16, N_Q = 1, N_K = 128K"] == pytest.approx(2.1, abs=0.05)
    assert rates["backward, Setting 1, BH = 16, N_Q = 1, N_K = 128K"] == pytest.approx(
        1.1, abs=0.05
    )


# Pictures.


def test_points_come_from_rows_with_a_figure():
    from bench import plots

    rows = [
        {"status": "ok", "x": 2, "y": 5.0, "entry": "a"},
        {"status": "ok", "x": 1, "y": 4.0, "entry": "a"},
        {"status": "skipped", "x": 3, "entry": "a"},
        {"status": "wrong", "x": 3, "entry": "b"},
        {"status": "ok", "x": 3, "y": None, "entry": "b"},
    ]
    found = plots.lines_of(rows, "x", "y", lambda row: row["entry"], lambda row: row["x"] < 4)
    assert found == {"a": [(1, 4.0), (2, 5.0)]}


def _rows_of_lengths():
    for direction, mask, length in itertools.product(
        ("forward", "backward"), ("full", "causal"), (4096, 8192)
    ):
        about = {"direction": direction, "mask": mask, "length": length, "status": "ok"}
        yield about | {"entry": "ours", "ours": True, "rate": 500.0, "case": "c", "contender": "k"}


def test_pictures_are_drawn_from_the_results_that_exist(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import plots

    said = []
    assert plots.run(tmp_path, quick=False, say=said.append) == 0
    assert len(said) == 3
    assert all("run python -m bench" in text for text in said)
    environment = report.environment(commit="abc")
    rows = list(_rows_of_lengths())
    _report(name="lengths", rows=rows, environment=environment).write(tmp_path)
    assert command_line.main(["plot", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["lengths.png"]
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert command_line.main(["plot", "--quick", "--out", str(tmp_path)]) == 1


def test_panels_of_the_memory_leave_out_what_is_no_square():
    from bench import plots

    row = {"status": "ok", "direction": "forward", "entry": "ours", "extra_bytes": 10}
    row |= {"length": 1024, "num_queries": 1024, "logits_bytes": 99}
    rows = [row, row | {"num_queries": 16, "extra_bytes": 7}]
    rows.append(row | {"direction": "backward", "extra_bytes": 0})
    forward, backward = plots.memory_panels(_report(rows=rows))
    assert forward.lines == {
        "ours": [(1024, 10)],
        "both logit matrices (computed)": [(1024.0, 99.0)],
    }
    assert backward.lines == {}
