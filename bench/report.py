"""Results: the machine they come from, their file, their tables."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from . import digest

SCHEMA = 1
RESULTS = Path(__file__).resolve().parent / "results"

# Where one module comes from several distributions, the first that is installed counts.
_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-core": ("cuda-core",),
    "torch": ("torch",),
    "triton": ("triton",),
    "jax": ("jax",),
    "fla": ("fla-core",),
}
_MAX_TEXT_WIDTH = 60
_CARD_FIELDS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes
    ----------
    key
        Of the row.
    title
        Head of the column, with the unit.
    spec
        Format specification of a number: ``".2f"``. Empty for text.
    """

    key: str
    title: str
    spec: str = ""

    def cell(self, row: Row) -> str:
        """The value of a row as text; what the row does not have is a dash."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.spec)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one command.

    Attributes
    ----------
    name
        Stem of the file.
    title
        One line for the reader.
    columns
        What the table shows, in order; rows may hold more.
    rows
        The measurements. A row whose ``status`` is not ``"ok"`` has no figure.
    notes
        Lines below the table.
    environment, settings
        The machine and the code; the options of the command.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a result was wrong, or a kernel of this package did not run."""
        return any(
            row["status"] == "wrong" or (row["status"] == "failed" and row["ours"])
            for row in self.rows
        )

    def write(self, directory: Path = RESULTS) -> Path:
        """Write ``<name>.json``, its rows as ``<name>.csv`` and, for the reader, ``<name>.md``.

        Returns
        -------
        Path
            Of the JSON file.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {"schema": SCHEMA, **asdict(self)}
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")
        self._write_csv(path.with_suffix(".csv"))
        return path

    def _write_csv(self, path: Path) -> None:
        """What the rows hold, lists and tables among it left out; a column a key."""
        plain = [
            {k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in self.rows
        ]
        keys = dict.fromkeys(key for row in plain for key in row)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, tuple(keys), lineterminator="\n")
            writer.writeheader()
            writer.writerows(plain)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file that `write` wrote.

        Raises
        ------
        ValueError
            If the file is of another version of this format.
        """
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(
                f"{path}: expected schema {SCHEMA}, got {schema}; run the command again"
            )
        content["columns"] = tuple(Column(**column) for column in content["columns"])
        return cls(**content)

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            # Numbers are never cut; where the terminal is narrow, text is.
            widths = [len(column.cell(row)) for row in self.rows]
            table.add_column(
                column.title,
                justify="right" if column.spec else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=max([len(column.title), *widths]) if column.spec else None,
                max_width=None if column.spec else _MAX_TEXT_WIDTH,
            )
        for before, row in zip([None, *self.rows], self.rows, strict=False):
            if before is not None and before.get("case") != row.get("case"):
                table.add_section()
            style = None if row.get("status", "ok") in ("ok", "skipped") else "bold red"
            table.add_row(*(column.cell(row) for column in self.columns), style=style)
        return table

    def markdown(self) -> str:
        """The same for a README: title, table, notes, and where it comes from."""
        lines = [f"### {self.title}", "", _markdown_line([c.title for c in self.columns])]
        lines.append(_markdown_line(["--:" if column.spec else "---" for column in self.columns]))
        lines += [_markdown_line([c.cell(row) for c in self.columns]) for row in self.rows]
        lines += ["", *(f"* {note}" for note in self.notes)]
        if self.environment:
            lines += ["", provenance(self.environment)]
        return "\n".join(lines) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def provenance(environment: Mapping[str, Any]) -> str:
    """One sentence on where figures come from."""
    device = environment["device"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v is not None)
    commit = environment["commit"] or "unknown"
    sources = environment["digests"]["cuda_src"][:12]
    card = f"{device['name']}, driver {device['driver_version']}" if device else "no card"
    return f"{card}; {versions}; {environment['date']}; commit {commit[:12]}; cuda_src {sources}."


def environment(*, commit: str | None = None, device_index: int = 0) -> dict[str, Any]:
    """The machine and the code: what a result has to be read with.

    Parameters
    ----------
    commit
        The commit, for a copy of the tree that has no git directory.
    device_index
        The card, as CUDA counts.

    Returns
    -------
    dict
        ``date`` (UTC), ``commit`` (None if unknown), ``modified`` (whether files that git follows
        differ from it, None if unknown), ``digests``, ``versions``, ``device`` (None without
        a card) and ``platform``.
    """
    found, modified = _git()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or found,
        "modified": modified,
        "digests": digest.digests(),
        "versions": versions(),
        "device": card(device_index),
        "platform": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Version of Python, of NVRTC and of the libraries; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        installed = (_installed(distribution) for distribution in distributions)
        found[name] = next((version for version in installed if version), None)
    found["nvrtc"] = _nvrtc_version()
    return found


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc_version() -> str | None:
    try:
        from cupy.cuda import nvrtc
    except ImportError:
        return None
    return ".".join(map(str, nvrtc.getVersion()))


def query_card(fields: Sequence[str], device_index: int = 0) -> dict[str, str] | None:
    """Fields of ``nvidia-smi --query-gpu``; None where there is no nvidia-smi or no card."""
    command = [
        "nvidia-smi",
        f"--id={device_index}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in result.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None


def card(device_index: int = 0) -> dict[str, str] | None:
    """Name, driver, memory (MiB), power limit (W) and highest clock (MHz) of the card."""
    return query_card(_CARD_FIELDS, device_index)


def _git() -> tuple[str | None, bool | None]:
    """The commit checked out and whether files that git follows differ from it."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(digest.ROOT), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return result.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", *digest.DIRECTORIES)
    return commit, None if commit is None or changes is None else bool(changes)
