"""The STREAMKL_* variables: defaults, values, and the texts of the errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from streamkl_cupy import env

PACKAGE = Path(env.__file__).parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STREAMKL_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_and_empty_mean_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        for name in ("CACHE_DIR", "CACHE_SIZE", "CHOICES", "DEBUG", "FORCE"):
            monkeypatch.setenv(f"STREAMKL_{name}", text)
    assert env.cache_dir() is None
    assert env.cache_size() == 512_000_000
    assert env.choices() is True
    assert env.debug() is False
    assert env.force() is None


def test_variables_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for directory in (tmp_path / "one", tmp_path / "two"):
        monkeypatch.setenv("STREAMKL_CACHE_DIR", str(directory))
        assert env.cache_dir() == directory


def test_cache_dir_expands_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("STREAMKL_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"


@pytest.mark.parametrize(("text", "size"), [("1", 10**6), (" 64 ", 64 * 10**6)])
def test_cache_size_counts_megabytes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("STREAMKL_CACHE_SIZE", text)
    assert env.cache_size() == size


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("position", range(4))
def test_debug(monkeypatch: pytest.MonkeyPatch, value: bool, position: int) -> None:
    words = ("1", "true", "YES", "On") if value else ("0", "false", "No", "oFF")
    monkeypatch.setenv("STREAMKL_DEBUG", words[position])
    assert env.debug() is value


def test_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, expected in (("1", True), ("On", True), ("0", False), ("OFF", False)):
        monkeypatch.setenv("STREAMKL_CHOICES", text)
        assert env.choices() is expected
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(tmp_path / "mine.json"), "~/mine.json"):
        monkeypatch.setenv("STREAMKL_CHOICES", text)
        assert env.choices() == tmp_path / "mine.json"


def test_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMKL_FORCE", "forward_sm80")
    assert env.force() == "forward_sm80"


@pytest.mark.parametrize(
    ("function", "name", "text", "message"),
    [
        (
            env.cache_dir,
            "STREAMKL_CACHE_DIR",
            "kernels",
            "STREAMKL_CACHE_DIR: expected an absolute path, got 'kernels'; write the path in full.",
        ),
        *(
            (
                env.cache_size,
                "STREAMKL_CACHE_SIZE",
                text,
                "STREAMKL_CACHE_SIZE: expected a whole number of megabytes, at least 1, "
                f"got '{text}'; for example STREAMKL_CACHE_SIZE=512.",
            )
            for text in ("0", "-5", "1.5", "1e3", "64MB", "1_000", "1234567890")
        ),
        *(
            (
                env.debug,
                "STREAMKL_DEBUG",
                text,
                "STREAMKL_DEBUG: expected one of 1 true yes on 0 false no off, "
                f"got '{text}'; set STREAMKL_DEBUG=1 to see what runs, or unset it.",
            )
            for text in ("2", "verbose")
        ),
        (
            env.choices,
            "STREAMKL_CHOICES",
            "mine.json",
            "STREAMKL_CHOICES: expected an absolute path or one of 1 true yes on 0 false no off, "
            "got 'mine.json'; set STREAMKL_CHOICES=0 to plan without what was tuned, or unset it.",
        ),
        *(
            (
                env.force,
                "STREAMKL_FORCE",
                text,
                "STREAMKL_FORCE: expected the name of one kernel, "
                f"got '{text}'; for example STREAMKL_FORCE=forward_sm80.",
            )
            for text in ("Forward", "forward_sm80,backward_dq_sm80", "80")
        ),
    ],
)
def test_error_texts(
    monkeypatch: pytest.MonkeyPatch, function: object, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    assert callable(function)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function()


def test_the_variables_are_read_in_env_only() -> None:
    reading = re.compile(r"(environ|getenv)[^\n]*STREAMKL_")
    for file in PACKAGE.glob("*.py"):
        assert file.name == "env.py" or not reading.search(file.read_text()), file.name
