"""Write what was measured into the README: ``python -m bench.readme [FILE ...]``.

Each FILE is a result of ``python -m bench`` for the table of speeds, by default those of
``forward`` and ``backward``. The other blocks take what lies in ``bench/results``; a block without
a file of results is empty. No figure between the markers is written by hand: a test renders all of
it again and compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import published
from .cases import AUTO, FUSED, SEPARATE
from .digest import ROOT
from .peers import ATTENTION, CEILINGS
from .plots import PICTURES
from .report import Column, Report, Row, provenance

RESULTS = "bench/results"
DEFAULT = (f"{RESULTS}/forward.json", f"{RESULTS}/backward.json")
COLUMNS = (
    Column("case", "case"),
    Column("contender", "kernel"),
    Column("median_ms", "ms", ".2f"),
    Column("rate", "TFLOP/s", ".0f"),
    Column("ratio", "of cuBLAS", ".2f"),
    Column("bars_text", "reached"),
)
# Of the tables in which a peer may win.
COMPARED = ("forward", "backward", "small_q", "lengths", "peers")
# Lines of the table of accuracy: one for each of these, of several outputs the largest error.
ERRORS = {
    "kl": ("kl",),
    "lse": ("lse1", "lse2"),
    "dq1": ("dq1",),
    "dk1": ("dk1",),
    "dq2": ("dq2",),
    "dk2": ("dk2",),
}


def block(name: str) -> re.Pattern[str]:
    """What stands between two markers."""
    return re.compile(rf"(?<=<!-- {name}:begin -->\n).*?(?=<!-- {name}:end -->)", re.DOTALL)


BLOCK = block("speed")


def render(paths: Sequence[str], root: Path = ROOT) -> str:
    """The table of speeds.

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
    lines += _head([column.title for column in COLUMNS], [bool(column.spec) for column in COLUMNS])
    for report in reports:
        shown = [row for row in report.rows if row.get("headline", True)]
        for row in (row for row in shown if row["status"] == "ok"):
            named = {**row, "case": f"{report.name}, {row['case']}"}
            lines.append(_line([column.cell(named) for column in COLUMNS]))
    return "\n".join(lines) + "\n"


def _head(titles: Sequence[str], are_numbers: Sequence[bool]) -> list[str]:
    return [_line(titles), _line(["--:" if is_number else "---" for is_number in are_numbers])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _reports(names: Sequence[str], root: Path) -> Iterator[tuple[str, Report]]:
    """The reports that exist, with their paths."""
    for name in names:
        path = f"{RESULTS}/{name}.json"
        if (root / path).exists():
            yield path, Report.read(root / path)


def _chosen(rows: Sequence[Row]) -> Row | None:
    """The row of what a caller gets: the plan's choice, or the faster one that can be asked for."""
    own = [row for row in rows if row["ours"] and row["status"] == "ok"]
    named = [row for row in own if row.get("entry", AUTO) in (AUTO, FUSED, SEPARATE)]
    plan = [row for row in named if row.get("entry") == AUTO]
    return min(plan or named, key=lambda row: row["median_ms"], default=None)


def _cases(report: Report) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        found.setdefault(row["case"], []).append(row)
    return found


def peers(root: Path = ROOT) -> str:
    """A line for each place where a peer wins: by its time where it computes the same, by its rate
    where it computes attention."""
    wins: list[str] = []
    rates: list[str] = []
    num_peers = num_attention = 0
    for path, report in _reports(COMPARED, root):
        for case, rows in _cases(report).items():
            ours = _chosen(rows)
            if ours is None:
                continue
            name = f"{report.name}, {case}"
            for row in rows:
                if row["ours"] or row["status"] != "ok" or row["contender"].startswith(CEILINGS):
                    continue
                if row["contender"].startswith(tuple(ATTENTION.values())):
                    num_attention += 1
                    if row["rate"] > ours["rate"]:
                        figures = f"{row['rate']:.0f}, ours {ours['rate']:.0f} {row['unit']}"
                        rates.append(f"- [{name}]({path}): {row['contender']} {figures}")
                    continue
                num_peers += 1
                if row["median_ms"] < ours["median_ms"]:
                    figures = f"{row['median_ms']:.3g} ms, ours {ours['median_ms']:.3g} ms"
                    detail = f" ({row['detail']})" if row["contender"] == "fla" else ""
                    wins.append(f"- [{name}]({path}): {row['contender']}{detail} {figures}")
    if not num_peers + num_attention:
        return ""
    lines = _listed(
        f"A peer that computes the same is faster in {len(wins)} of {num_peers} comparisons", wins
    )
    if num_attention:
        lines += _listed(
            "Softmax attention, which has other products to do on the same matrix units, runs at a "
            f"higher rate in {len(rates)} of {num_attention}",
            rates,
        )
    return "\n".join(lines)


def _listed(sentence: str, items: Sequence[str]) -> list[str]:
    """A sentence and what it announces, if anything."""
    return [f"{sentence}:", "", *items, ""] if items else [f"{sentence}.", ""]


def as_published(root: Path = ROOT) -> str:
    """The paper's own figures, beside what is known of the same problems here."""
    measured: dict[tuple[str, str, int], Row] = {}
    for _, report in _reports(("forward", "backward", "small_q"), root):
        for rows in _cases(report).values():
            ours = _chosen(rows)
            if ours is not None:
                direction = "backward" if report.name.startswith("backward") else "forward"
                setting = ours.get("setting", 1)
                measured[ours["workload"], ours.get("direction", direction), setting] = ours
    titles = ["problem", "as published (ms)", "as published (rate)", "here (ms)"]
    lines = _head(titles, [False, True, True, True])
    for figure in published.FIGURES:
        setting = figure.workload.setting if figure.direction == "backward" else 1
        row = measured.get((figure.workload.name, figure.direction, setting))
        rate = f"{figure.rate:.3g} {figure.unit}"
        here = "-" if row is None else f"{row['median_ms']:.3g}"
        lines.append(_line([figure.label, f"{figure.milliseconds:g}", rate, here]))
    return "\n".join(lines) + "\n"


def pictures(root: Path = ROOT) -> str:
    """The pictures that were drawn from results that exist."""
    lines = []
    for picture in PICTURES:
        source = f"{RESULTS}/{picture.source}.json"
        path = f"{RESULTS}/{picture.source}.png"
        if (root / source).exists() and (root / path).exists():
            lines.append(f"[![{picture.alt}]({path})]({source})")
    return "\n\n".join(lines) + "\n" if lines else ""


def accuracy(root: Path = ROOT) -> str:
    """The table of errors, a column for everybody who took part."""
    found = list(_reports(("accuracy",), root))
    if not found:
        return ""
    ((path, report),) = found
    shown = [row for row in report.rows if row["headline"]]
    names = list(dict.fromkeys(row["contender"] for row in shown if row["status"] != "skipped"))
    lines = [f"[{report.title}]({path}), {provenance(report.environment)}", ""]
    lines += _head(["case", "output", *names], [False, False, *(True for _ in names)])
    for case, rows in _cases(Report("", "", (), shown)).items():
        by_name = {row["contender"]: row for row in rows}
        outputs = ERRORS if rows[0]["kind"] != "near" else {"kl": ("kl",)}
        for output, keys in outputs.items():
            cells = [_error(by_name.get(name), keys) for name in names]
            lines.append(_line([case, output, *cells]))
    floor = [f"- {note}" for note in report.notes if note.startswith("Floor")]
    return "\n".join([*lines, *(["", *floor] if floor else [])]) + "\n"


def _error(row: Row | None, keys: Sequence[str]) -> str:
    """The largest of some errors, marked where it breaks the rule."""
    if row is None or not any(key in row for key in keys):
        return "-"
    broken = set(row["rule"].removeprefix("broken: ").split(", ")) & set(keys)
    values = [row[key] for key in keys]
    text = "not finite" if None in values else f"{max(values):.1e}"
    return f"{text} (breaks the rule)" if broken else text


BLOCKS: dict[str, Callable[[Path], str]] = {
    "peers": peers,
    "published": as_published,
    "plots": pictures,
    "accuracy": accuracy,
}


def main(paths: Sequence[str]) -> None:
    """Put all of it into the README."""
    relative = [Path(path).resolve().relative_to(ROOT).as_posix() for path in paths]
    texts = {"speed": render(relative or DEFAULT)}
    texts |= {name: make(ROOT) for name, make in BLOCKS.items()}
    readme = ROOT / "README.md"
    written = readme.read_text(encoding="utf-8")
    for name, text in texts.items():
        written = block(name).sub(lambda _, text=text: text, written, count=1)
    readme.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
