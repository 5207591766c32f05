"""The command line: what it says, its JSON, its exit codes."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamkl_cupy import __version__, api, audit, choices, cli, launch, plan, tiling, timing, tune

NO_CARD = "there is no NVIDIA card"
SMALL = ["--num-queries", "17", "--num-keys", "20", "--num-heads", "2", "--head-dim1", "16"]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("STREAMKL_CACHE_DIR", str(directory))
    # The width of a terminal decides where rich breaks lines.
    monkeypatch.setenv("COLUMNS", "200")
    return directory


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_card", lambda: (None, NO_CARD))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str, code: int = 0) -> str:
        assert cli.main(words) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str, code: int = 0) -> Any:
        assert cli.main([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


def spoil_forward(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = api.attention_kl

    def wrong(*args: Any, **options: Any) -> Any:
        state = right(*args, **options)
        return type(state)(np.asarray(state.kl) * factor, state.lse1, state.lse2)

    monkeypatch.setattr(api, "attention_kl", wrong)


def save(path: Path, dtype: str = "float16", **extra: np.ndarray) -> dict[str, np.ndarray]:
    arrays = audit.random_problem(num_queries=9, num_keys=9, head_dim1=8, dtype=dtype, seed=3)
    del arrays["dkl"]
    np.savez(path, **arrays, **extra)
    return arrays


class TestDemo:
    def test_shows_the_kl_of_each_head_and_that_it_agrees(self, run: Any) -> None:
        text = run("demo", "--device", "cpu")
        assert "Computed by the float64 reference on the CPU." in text
        assert "2.279408821" in text
        assert "Everything agrees." in text
        for head in range(12):
            assert any(line.split()[1:2] == [str(head)] for line in text.splitlines())

    def test_json(self, run_json: Any) -> None:
        payload = run_json("demo", "--device", "cpu")
        assert payload["passes"] is True
        assert [passage["tokens"] for passage in payload["passages"]] == [61, 128, 323]
        last = payload["passages"][-1]
        assert last["mean_kl"] == pytest.approx(2.279408821, abs=1e-8)
        assert last["max_kl"] == pytest.approx(10.476518994, abs=1e-8)
        assert np.mean(last["kl_per_head"]) == pytest.approx(last["mean_kl"])
        assert all(norm > 0 for norm in last["gradient_norms"].values())
        names = [output["name"] for output in last["outputs"]]
        assert names == ["kl", "lse1", "lse2", "dq2", "dk2"]

    def test_says_why_the_reference_computes(self, run: Any, no_card: None) -> None:
        text = run("demo")
        assert f"the float64 reference on the CPU, because {NO_CARD}" in text

    def test_a_wrong_kl_is_exit_code_1(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        spoil_forward(monkeypatch, 1.001)
        assert "That does not agree." in run("demo", "--device", "cpu", code=1)


class TestAudit:
    def test_of_a_random_problem(self, run: Any) -> None:
        masks = ("--causal", "--window", "5", "-1", "--q-offset", "2")
        text = run("audit", "--device", "cpu", *SMALL, *masks)
        assert "q1 (1, 2, 17, 16)" in text
        assert "k2 (1, 2, 20, 16)" in text
        assert "bfloat16, causal, window [5, -1], q_offset 2" in text
        assert text.count(" ok ") == 7
        assert all(word in text for word in ("size", "error", "textbook float32", "allowed"))
        assert "The rule holds." in text

    def test_options_reach_the_problem(self, run_json: Any) -> None:
        options = ["--batch", "2", "--num-key-heads1", "1", "--head-dim2", "24", "--seed", "5"]
        options += ["--layout", "bnhd", "--scale1", "0.5", "--scale2", "-1", "--dtype", "float64"]
        payload = run_json("audit", "--device", "cpu", *SMALL, *options)
        assert payload["shapes"] == {
            "q1": [2, 17, 2, 16],
            "k1": [2, 20, 1, 16],
            "q2": [2, 17, 2, 24],
            "k2": [2, 20, 2, 24],
            "dkl": [2, 17, 2],
        }
        assert payload["dtype"] == "float64"
        assert (payload["scale1"], payload["scale2"], payload["layout"]) == (0.5, -1.0, "bnhd")
        assert payload["passes"] is True
        baselines = {output["name"]: output["baseline"] for output in payload["outputs"]}
        other = run_json("audit", "--device", "cpu", *SMALL, *options, "--logit-scale", "9")
        assert baselines["lse1"] != other["outputs"][1]["baseline"]

    def test_a_broken_rule_is_exit_code_1(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        spoil_forward(monkeypatch, 1.00001)
        text = run("audit", "--device", "cpu", *SMALL, code=1)
        assert text.count("too large") == 1
        assert "The rule is broken." in text

    def test_of_the_users_arrays(self, run_json: Any, tmp_path: Path) -> None:
        arrays = save(tmp_path / "mine.npz")
        payload = run_json("audit", "--device", "cpu", "--npz", str(tmp_path / "mine.npz"))
        assert payload["source"] == str(tmp_path / "mine.npz")
        assert payload["dtype"] == "float16"
        assert payload["shapes"]["q1"] == list(arrays["q1"].shape)
        assert payload["passes"] is True

    def test_of_the_users_upstream_gradient(self, run_json: Any, tmp_path: Path) -> None:
        save(tmp_path / "mine.npz", dkl=np.zeros((1, 4, 9), np.float32))
        payload = run_json("audit", "--device", "cpu", "--npz", str(tmp_path / "mine.npz"))
        errors = {output["name"]: output["baseline"] for output in payload["outputs"]}
        assert errors["kl"] > 0
        assert errors["dq2"] == 0

    def test_bfloat16_arrays_come_back_from_a_file_as_bfloat16(
        self, run_json: Any, tmp_path: Path
    ) -> None:
        arrays = save(tmp_path / "mine.npz", dtype="bfloat16")
        assert arrays["q1"].dtype == ml_dtypes.bfloat16
        payload = run_json("audit", "--device", "cpu", "--npz", str(tmp_path / "mine.npz"))
        assert payload["dtype"] == "bfloat16"
        as_half = ["--npz", str(tmp_path / "mine.npz"), "--dtype", "float16"]
        assert run_json("audit", "--device", "cpu", *as_half)["dtype"] == "float16"

    def test_a_file_without_a_key(self, run: Any, tmp_path: Path) -> None:
        path = tmp_path / "mine.npz"
        np.savez(path, q1=np.ones((3, 8)), k1=np.ones((3, 8)), q2=np.ones((3, 8)))
        text = run("audit", "--npz", str(path), code=2)
        assert f"--npz: expected the arrays q1, k1, q2, k2 in {path}, got q1, k1, q2" in text
        assert "add k2" in text

    @pytest.mark.parametrize("content", [None, b"no archive", b""])
    def test_a_file_that_is_none(self, run: Any, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "mine.npz"
        if content is not None:
            path.write_bytes(content)
        text = run("audit", "--npz", str(path), code=2)
        assert f"--npz: expected a file of numpy.savez, got {path}" in text

    def test_a_plain_npy_file(self, run: Any, tmp_path: Path) -> None:
        np.save(tmp_path / "mine.npy", np.ones(3))
        text = run("audit", "--npz", str(tmp_path / "mine.npy"), code=2)
        assert "--npz: expected a file of numpy.savez" in text

    def test_shapes_and_a_file(self, run: Any, tmp_path: Path) -> None:
        save(tmp_path / "mine.npz")
        text = run("audit", "--npz", str(tmp_path / "mine.npz"), "--num-keys", "3", code=2)
        assert "--num-keys: --npz takes the shapes from the file; drop one of them" in text

    def test_arrays_that_do_not_fit(self, run: Any, tmp_path: Path) -> None:
        x = np.ones((3, 8), np.float16)
        np.savez(tmp_path / "mine.npz", q1=x, k1=x, q2=x, k2=x[:2])
        text = run("audit", "--device", "cpu", "--npz", str(tmp_path / "mine.npz"), code=2)
        assert text.startswith("error: k2: expected ")

    def test_non_finite_errors_are_null_in_json(
        self, run_json: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoil_forward(monkeypatch, float("nan"))
        payload = run_json("audit", "--device", "cpu", *SMALL, code=1)
        kl = payload["outputs"][0]
        assert kl["error"] is None
        assert kl["same_nonfinite"] is False


class TestWithoutACard:
    @pytest.mark.parametrize("command", ["demo", "audit"])
    def test_the_gpu_is_refused(self, run: Any, no_card: None, command: str) -> None:
        text = run(command, "--device", "gpu", code=2)
        assert text == (
            f"error: --device gpu: {NO_CARD}; use --device cpu for the float64 reference\n"
        )

    def test_errors_are_json_too(self, run_json: Any, no_card: None) -> None:
        payload = run_json("demo", "--device", "gpu", code=2)
        assert payload["error"].startswith(f"--device gpu: {NO_CARD}")

    def test_a_debugger_gets_the_traceback(
        self, no_card: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STREAMKL_DEBUG", "1")
        with pytest.raises(cli.CannotError):
            cli.main(["demo", "--device", "gpu"])

    def test_warmup_asks_for_an_architecture(self, run: Any, no_card: None) -> None:
        text = run("warmup", code=2)
        assert f"warmup: {NO_CARD}; name the architecture to build for" in text

    def test_info(self, run: Any, run_json: Any, no_card: None, cache: Path) -> None:
        text = run("info")
        assert f"none: {NO_CARD}" in text
        assert "the float64 reference on the CPU" in text
        assert np.__version__ in text
        payload = run_json("info")
        assert payload["version"] == __version__
        assert payload["card"] is None
        assert payload["no_card"] == NO_CARD
        assert payload["packages"]["numpy"] == np.__version__
        assert payload["cache"]["directory"] == str(cache)


class TestWarmup:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def warmup(
            head_dim1: int, head_dim2: int, dtype: str, *, progress: Any, **options: Any
        ) -> tuple[str, ...]:
            calls.append({"dims": (head_dim1, head_dim2), "dtype": dtype, **options})
            progress(0, 1, "forward_sm80<bf16>")
            progress(1, 1, "")
            return (f"forward_sm80_d{head_dim1}x{head_dim2}",)

        monkeypatch.setattr(api, "warmup", warmup)
        return calls

    def test_every_head_dim_and_dtype_is_built(self, run: Any, calls: list[dict[str, Any]]) -> None:
        words = "--head-dims 64 192:128 --dtypes bfloat16 float16 --wrt q1 k2 --arch sm_90a"
        text = run("warmup", *words.split())
        assert [(call["dims"], call["dtype"]) for call in calls] == [
            ((64, 64), "bfloat16"),
            ((64, 64), "float16"),
            ((192, 128), "bfloat16"),
            ((192, 128), "float16"),
        ]
        assert all(call["wrt"] == ["q1", "k2"] for call in calls)
        assert all(call["arch"] == "sm_90a" for call in calls)
        added = ("unaligned", "windowed", "ragged", "entropy", "softcap")
        assert all(call["backward"] and not any(call[n] for n in added) for call in calls)
        assert "forward_sm80_d192x128" in text
        assert "1/1" in text, "the progress bar has ended"

    def test_json(self, run_json: Any, calls: list[dict[str, Any]]) -> None:
        words = "--arch sm_80 --forward-only --unaligned --windowed --ragged --entropy --softcap"
        payload = run_json("warmup", *words.split())
        assert payload["warmed"] == [
            {
                "head_dim1": 128,
                "head_dim2": 128,
                "dtype": "bfloat16",
                "plans": ["forward_sm80_d128x128"],
            }
        ]
        assert not calls[0]["backward"]
        assert calls[0]["unaligned"]
        assert calls[0]["windowed"]
        assert calls[0]["ragged"]
        assert calls[0]["entropy"]
        assert calls[0]["softcap"]

    @pytest.mark.parametrize("word", ["wide", "64:", "1:2:3"])
    def test_a_head_dim_that_is_none(
        self, word: str, capsys: pytest.CaptureFixture[str], calls: list[dict[str, Any]]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["warmup", "--arch", "sm_80", "--head-dims", word])
        assert stopped.value.code == cli.CANNOT
        assert "--head-dims" in capsys.readouterr().err
        assert not calls


class TestTune:
    """On a card that is only pretended, where one tile is the fastest."""

    CARD = "NVIDIA H200"
    FACTS = plan.device_facts("sm_90a")
    FASTEST = tiling.WarpgroupTile(2, 96, 3, False)
    SMALL = ("--num-heads", "4", "--num-queries", "512")

    @pytest.fixture(autouse=True)
    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = types.SimpleNamespace(id=0)
        cuda = types.SimpleNamespace(Device=lambda: device)
        cupy = types.SimpleNamespace(cuda=cuda)

        def sweep(
            tasks: dict[str, tune.Task], facts: plan.DeviceFacts, *, seconds: float, say: Any
        ) -> dict[str, tune.Swept]:
            assert seconds == 120
            return {name: self.swept(task, facts) for name, task in tasks.items()}

        def device_facts(index: int) -> plan.DeviceFacts:
            return self.FACTS

        device_facts.cache_clear = lambda: None  # type: ignore[attr-defined]
        monkeypatch.setattr(cli, "find_card", lambda: (cupy, self.CARD))
        monkeypatch.setattr(launch, "device_facts", device_facts)
        monkeypatch.setattr(tune, "tune", sweep)
        self.wrong = ""

    def swept(self, task: tune.Task, facts: plan.DeviceFacts) -> tune.Swept:
        candidates = task.candidates(facts)
        own = next(iter(candidates))
        wrong = self.wrong

        class Subject:
            def planned(self) -> tune.Plan:
                return task.planned(facts)

            call = planned

            def check(self) -> str:
                return "" if self.planned() == own else wrong

        def watch(call: timing.Call, count: int) -> float:
            return count * (0.5 if self.is_fastest(call()) else 1.0)

        return tune.sweep(candidates, Subject(), watch, refused={}, pause=lambda: None, rounds=3)

    def is_fastest(self, made: Any) -> bool:
        return getattr(made, "tile", None) == self.FASTEST

    def test_the_fastest_is_kept_for_later_calls(self, run: Any, cache: Path) -> None:
        text = run("tune", *self.SMALL)
        path = cache / "choices-nvidia_h200-sm_90a.json"
        assert f"Kept in {path}; every later process plans by it." in text
        assert "the fastest is 2.00 times as fast as the plan's own" in text
        assert "the plan's own choice is as fast as any" in text, "of the gradients"
        assert "forward_sm90<2, 96, 3, false" in text
        (entry,) = choices.load(self.CARD, self.FACTS)
        assert entry.choice.forward_tile == self.FASTEST
        assert entry.shape == (4, 512, 512)

    def test_json_and_dry_run(self, run_json: Any, cache: Path) -> None:
        words = ["--dry-run", "--wrt", "q1", "q2", "k2", "--deterministic", "--num-key-heads2", "1"]
        payload = run_json("tune", *self.SMALL, *words)
        assert payload["file"] is None
        assert list(cache.iterdir()) == []
        names = [task["task"] for task in payload["tasks"]]
        assert names == ["forward", "gradients of q1", "gradients of q2 k2"]
        forward = payload["tasks"][0]
        assert forward["kept"]
        assert forward["gain"] == 2.0
        assert sum(one["own"] for one in forward["tried"]) == 1
        assert {one["status"] for one in forward["tried"]} == {"ok", "slow"}

    def test_the_forward_alone(self, run_json: Any) -> None:
        payload = run_json("tune", "--forward-only", "--dry-run", *self.SMALL)
        assert [task["task"] for task in payload["tasks"]] == ["forward"]

    def test_a_wrong_candidate_is_exit_code_1(self, run_json: Any) -> None:
        self.wrong = "differs"
        payload = run_json("tune", "--forward-only", *self.SMALL, code=1)
        (task,) = payload["tasks"]
        assert not task["kept"]
        assert {one["detail"] for one in task["tried"] if one["status"] == "wrong"} == {"differs"}
        assert choices.load(self.CARD, self.FACTS) == ()

    def test_turned_off_there_is_nothing_to_keep(
        self, run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STREAMKL_CHOICES", "0")
        text = run("tune", *self.SMALL, code=2)
        assert "STREAMKL_CHOICES turns tuned choices off" in text
        assert "Nothing was kept." in run("tune", "--forward-only", "--dry-run", *self.SMALL)

    def test_sizes_that_are_none(self, run: Any) -> None:
        assert "head dimension" in run("tune", "--head-dim1", "100", code=2)

    def test_info_shows_what_is_in_force(self) -> None:
        problem_of = cli._tune_tasks(
            cli._parser().parse_args(["tune", *self.SMALL, "--causal", "--num-key-heads1", "2"]),
            tune.Task,
        )
        choice = plan.Choice(4, "forward_sm90", self.FASTEST)
        entry = cli._tuned_entry(problem_of["forward"].tuned(choice))
        assert entry == {
            "problem": "forward: bfloat16, 4 heads, 512 x 512, head dims 128 128, causal, groups "
            "of 2 and 1",
            "choice": "forward_sm90(2, 96, 3, False) 4 splits",
        }
        tile = tiling.BackwardTile(1, 8, 32, 32, 2)
        choice = plan.Choice(strategy="separate", backward_tiles=(("backward_dk_sm80", tile),))
        entry = cli._tuned_entry(problem_of["gradients of q2 k2"].tuned(choice))
        assert entry["problem"].startswith("gradients of k2 q2: ")
        assert entry["choice"] == "separate backward_dk_sm80(1, 8, 32, 32, 2)"


class TestCache:
    @pytest.fixture
    def kernels(self, cache: Path) -> Path:
        for kernel in ("a", "b"):
            for suffix in ("cubin", "json"):
                (cache / f"forward_sm80-sm_80-{kernel * 32}.{suffix}").write_bytes(b"x" * 1000)
        (cache / "notes.txt").write_text("mine")
        return cache

    def test_info(self, run: Any, run_json: Any, kernels: Path) -> None:
        assert "2 kernels, 4.0 kB of at most 512.0 MB" in run("cache", "info")
        payload = run_json("cache", "info")
        assert (payload["num_kernels"], payload["size_bytes"]) == (2, 4000)
        assert payload["directory"] == str(kernels)

    def test_clear(self, run: Any, run_json: Any, kernels: Path) -> None:
        assert f"Removed 2 kernels from {kernels}." in run("cache", "clear")
        assert [path.name for path in kernels.iterdir()] == ["notes.txt"]
        assert run_json("cache", "clear")["num_removed"] == 0

    def test_an_unsafe_directory_is_exit_code_2(self, run: Any, cache: Path) -> None:
        cache.chmod(0o777)
        assert "error: cache directory: expected mode 700" in run("cache", "info", code=2)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"streamkl-cupy {__version__}\n"


def test_without_a_command_it_says_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == cli.CANNOT
    assert "usage: streamkl-cupy" in capsys.readouterr().err
