"""Write the README's table of speeds from a file of results: ``python -m bench.readme FILE``.

FILE is a JSON object under bench/results with

* ``"gpu"``: the card's name;
* ``"workload"``: what was measured, in a few words;
* ``"columns"``: the columns, each ``[key, title]``;
* ``"rows"``: one object a row, with a text or a number under each key.

No figure of that table is written by hand; a test renders it again.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?<=<!-- speed:begin -->\n).*?(?=<!-- speed:end -->)", re.DOTALL)


def render(results: dict[str, Any], path: str) -> str:
    """The text between the README's two markers, for the results in `path`."""
    keys = [key for key, _ in results["columns"]]
    rows = [[title for _, title in results["columns"]]]
    rows += [[_cell(row[key]) for key in keys] for row in results["rows"]]
    rows.insert(1, ["---"] * len(keys))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{results['gpu']}, {results['workload']} ([{path}]({path})):\n\n{table}\n"


def _cell(value: float | int | str) -> str:
    if isinstance(value, str):
        return value
    # Three digits that count, without an exponent.
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def main() -> None:
    path = Path(sys.argv[1]).resolve().relative_to(ROOT)
    text = render(json.loads((ROOT / path).read_text(encoding="utf-8")), path.as_posix())
    readme = ROOT / "README.md"
    readme.write_text(
        BLOCK.sub(lambda _: text, readme.read_text(encoding="utf-8"), count=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
