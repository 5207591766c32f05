"""Pictures of results: ``python -m bench plot``. Needs matplotlib and no card.

Every point is a row of a committed file; what a picture shows and from which card stands below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Report, Row, provenance

Points = list[tuple[float, float]]
Lines = dict[str, Points]


@dataclass(frozen=True, slots=True)
class Panel:
    """One coordinate system: its lines by their names, which axes are logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Lines
    is_log_y: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, the report it is made of, and how.

    Attributes
    ----------
    source
        Name of the report, and stem of the PNG.
    alt
        What the README says of it.
    panels
        Of a report.
    """

    source: str
    alt: str
    panels: Callable[[Report], list[Panel]]


def lines_of(
    rows: Iterable[Row], x: str, y: str, name: Callable[[Row], str], keep: Callable[[Row], bool]
) -> Lines:
    """Points of the rows that have a figure, sorted, by the names of their lines.

    Parameters
    ----------
    rows
        Of a report.
    x, y
        Keys of the coordinates.
    name
        Of the line of a row.
    keep
        Which rows are shown.
    """
    lines: Lines = {}
    for row in rows:
        if row["status"] in ("ok", "wrong") and row.get(y) is not None and keep(row):
            lines.setdefault(name(row), []).append((row[x], row[y]))
    return {name: sorted(points) for name, points in lines.items()}


def speed_panels(report: Report) -> list[Panel]:
    """TFLOP/s over the length of the context, a panel a direction."""
    panels = []
    for direction in ("forward", "backward"):
        lines = lines_of(
            report.rows,
            "length",
            "rate",
            lambda row: f"{row['entry']}, {row['mask']}",
            lambda row, direction=direction: row["direction"] == direction,
        )
        panels.append(Panel(direction, "tokens", "TFLOP/s", lines))
    return panels


def memory_panels(report: Report) -> list[Panel]:
    """Bytes beyond the inputs over the length of the context, a panel a direction."""
    panels = []
    for direction in ("forward", "backward"):

        def keep(row: Row, direction: str = direction) -> bool:
            return row["direction"] == direction and row["num_queries"] == row["length"]

        kept = [row for row in report.rows if keep(row)]
        # What is 0 bytes has no place on a logarithmic axis.
        lines = lines_of(kept, "length", "extra_bytes", _entry, lambda row: row["extra_bytes"] > 0)
        logits = sorted({(row["length"], row["logits_bytes"]) for row in kept})
        if lines:
            lines["both logit matrices (computed)"] = [(float(x), float(y)) for x, y in logits]
        panels.append(Panel(direction, "tokens", "bytes beyond the inputs", lines, is_log_y=True))
    return panels


def accuracy_panels(report: Report) -> list[Panel]:
    """Errors over the size of the logits, of the cases that the README shows."""
    panels = []
    for output in ("kl", "dq1", "dq2"):
        lines = lines_of(
            report.rows,
            "logit_scale",
            output,
            _entry,
            lambda row: row["kind"] == "logits" and row["headline"],
        )
        label = "norm-relative error"
        panels.append(Panel(output, "size of the logits", label, lines, is_log_y=True))
    return panels


PICTURES = (
    Picture("lengths", "Speed over context length", speed_panels),
    Picture("memory", "Extra memory over context length", memory_panels),
    Picture("accuracy", "Error over the size of the logits", accuracy_panels),
)


def _entry(row: Row) -> str:
    name: str = row["entry"]
    return name


def draw(panels: Sequence[Panel], caption: str, path: Path) -> None:
    """Write a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel)
    figure.supxlabel(caption, fontsize=6)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    for index, (name, points) in enumerate(panel.lines.items()):
        style = "--" if not name.startswith("ours") else "-"
        marker = "osv^D<>pX*"[index % 10]
        axes.plot(*zip(*points, strict=True), style, marker=marker, markersize=4, label=name)
    places = sorted({x for points in panel.lines.values() for x, _ in points})
    axes.set_xscale("log")
    axes.set_xticks(places, [_short(x) for x in places], fontsize=7)
    axes.minorticks_off()
    if panel.is_log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def _short(x: float) -> str:
    """``16K`` for 16384."""
    return f"{x / 1024:g}K" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def run(directory: Path, *, quick: bool, say: Callable[[str], None]) -> int:
    """Draw what there are results for.

    Parameters
    ----------
    directory
        Of the results, and of the pictures.
    quick
        Take those of ``--quick`` runs.
    say
        Told what was drawn and what was not.

    Returns
    -------
    int
        How many pictures were drawn.
    """
    suffix = "_quick" if quick else ""
    count = 0
    for picture in PICTURES:
        source = directory / f"{picture.source}{suffix}.json"
        if not source.exists():
            say(f"{picture.alt}: no {source.name}; run python -m bench {picture.source}")
            continue
        report = Report.read(source)
        panels = [panel for panel in picture.panels(report) if panel.lines]
        if not panels:
            say(f"{picture.alt}: no figure in {source.name}")
            continue
        path = source.with_suffix(".png")
        draw(panels, f"{source.name}: {provenance(report.environment)}", path)
        say(f"{picture.alt}: drawn to {path}")
        count += 1
    return count
