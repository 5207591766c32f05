"""Write the README's table of speeds: ``python -m bench.readme [FILE ...]``.

Each FILE is a result of ``python -m bench``, by default those of ``forward`` and ``backward``. No
figure of the table is written by hand: a test renders it again and compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .digest import ROOT
from .report import Column, Report

DEFAULT = ("bench/results/forward.json", "bench/results/backward.json")
COLUMNS = (
    Column("case", "case"),
    Column("contender", "kernel"),
    Column("median_ms", "ms", ".2f"),
    Column("rate", "TFLOP/s", ".0f"),
    Column("ratio", "of cuBLAS", ".2f"),
    Column("bars_text", "reached"),
)
BLOCK = re.compile(r"(?<=<!-- speed:begin -->\n).*?(?=<!-- speed:end -->)", re.DOTALL)


def render(paths: Sequence[str], root: Path = ROOT) -> str:
    """The text between the README's two markers.

    Parameters
    ----------
    paths
        Files of results, relative to `root`, all of one card.
    root
        The directory of the README.

    Returns
    -------
    str
        The card, the files, and one table with every row that has a figure, of the cases that the
        bench marks for it where it marks some.

    Raises
    ------
    ValueError
        If the files are of different cards, or of none.
    """
    reports = [Report.read(root / path) for path in paths]
    cards = {(report.environment.get("device") or {}).get("name") for report in reports}
    if len(cards) != 1 or None in cards:
        raise ValueError(f"expected results of one card, got those of {cards}; measure again")
    (card,) = cards
    titles = (f"[{r.title}]({path})" for r, path in zip(reports, paths, strict=True))
    lines = [f"One {card}. " + "; ".join(titles) + ".", ""]
    lines.append("| " + " | ".join(column.title for column in COLUMNS) + " |")
    lines.append("| " + " | ".join("--:" if column.spec else "---" for column in COLUMNS) + " |")
    for report in reports:
        shown = [row for row in report.rows if row.get("headline", True)]
        for row in (row for row in shown if row["status"] == "ok"):
            named = {**row, "case": f"{report.name}, {row['case']}"}
            lines.append("| " + " | ".join(column.cell(named) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def main(paths: Sequence[str]) -> None:
    """Put the table into the README."""
    relative = [Path(path).resolve().relative_to(ROOT).as_posix() for path in paths]
    text = render(relative or DEFAULT)
    readme = ROOT / "README.md"
    written = BLOCK.sub(lambda _: text, readme.read_text(encoding="utf-8"), count=1)
    readme.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
