"""Draws the tables of a Markdown file as SVG plots, all in one style, for light and dark pages:

    python benchmarks/plots.py [README.md] [--to benchmarks/plots]

A table is the only record of its figures: a plot is drawn from the table's text, and the same text gives the same bytes.
A plot takes the first table that has its columns; one whose table is not in the file is left out.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, PANEL_GAP, ROW, TOP, PAD = 860, 40, 24, 44, 12
CHARACTER = 7.0
"""Pixels of a character, on average, of the names of rows."""
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#57606a}"
    ".h{font-weight:600;fill:#24292f}.v{font-variant-numeric:tabular-nums}.b{fill:#8c959f}.o{fill:#2f55d4}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}.h{fill:#f0f6fc}.b{fill:#6e7681}.o{fill:#8aa4ff}}"
)


@dataclass(frozen=True)
class Plot:
    """One panel of bars for each column. `logarithmic`: a bar's length stands for the magnitude."""

    title: str
    columns: tuple[str, ...]
    logarithmic: bool = False


PLOTS = {
    "step": Plot(
        "Wait of an agent for one step, logarithmic", ("one file changed: step", "1,000 files changed: step"), True
    ),
    "pause": Plot("Pause of an agent for one snapshot, ms", ("pause p50", "p95", "max")),
    "command": Plot(
        "A command with its snapshot, ms", ("nothing changed p50", "a file changed p50", "fork to first command p50")
    ),
    "maker": Plot("A sandbox by its maker, ms", ("create to first command: p50", "fork to first command: p50")),
    "history": Plot("Time to store one commit, logarithmic", ("time per commit", "restic", "borg"), True),
    "rewind": Plot("A rewind of files and mind, in place", ("one file", "20,000 files")),
    "gateway": Plot("A model request of 100 KB", ("to the reply's head: p50", "whole request: p50")),
    "fleet": Plot(
        "A fleet of this many nodes: cost of each", ("placing a fork", "a reservation", "publishing", "a renewal")
    ),
    "replay": Plot("Recorded calls, live and replayed", ("live", "replayed")),
}

Table = list[dict[str, str]]


def tables(text: str) -> list[Table]:
    """The tables of a Markdown text: rows by column; the column without a name is the first."""
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        names, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines())
        table: Table = []
        for cells in rows:
            row: dict[str, str] = {}
            for name, cell in zip(names, cells, strict=False):
                row.setdefault(name, cell)  # of two columns with one name the first
            table.append(row)
        found.append(table)
    return found


def number(cell: str) -> float | None:
    """The first number of a cell."""
    match = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    return None if match is None else float(match[0].replace(",", ""))


def draw(plot: Plot, table: Table) -> str:
    first = next(iter(table[0]))
    names = [row[first].replace("**", "").replace("`", "") for row in table]
    left = max(len(name) for name in names) * CHARACTER + PAD
    panel = (WIDTH - left - PANEL_GAP * (len(plot.columns) - 1)) / len(plot.columns)
    height = TOP + ROW * (len(table) + 1) + PAD
    parts = [f'<text class="h" x="{PAD}" y="20">{escape(plot.title)}</text>']
    for at, name in enumerate(names):
        y = TOP + ROW * (at + 1)
        own = ' class="h"' if "**" in table[at][first] else ""
        parts.append(f'<text{own} x="{left - 8:.0f}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
    values = {(at, column): number(table[at].get(column, "")) for at in range(len(table)) for column in plot.columns}
    known = [value for value in values.values() if value]
    for index, column in enumerate(plot.columns):
        x = left + index * (panel + PANEL_GAP)
        parts.append(f'<text x="{x:.0f}" y="{TOP + 12}">{escape(column)}</text>')
        for at in range(len(table)):
            value = values[at, column]
            if value is None:
                continue
            y, cell = TOP + ROW * (at + 1), table[at][column].replace("**", "")
            room = panel - len(cell) * CHARACTER - PAD
            length = max(1.5, room * _share(value, known, logarithmic=plot.logarithmic))
            own = "o" if "**" in table[at][first] or (not any("**" in row[first] for row in table)) else "b"
            parts.append(
                f'<rect class="{own}" x="{x:.0f}" y="{y + 2}" width="{length:.1f}" height="{ROW - 9}" rx="2"/>'
            )
            parts.append(f'<text class="v" x="{x + length + 6:.1f}" y="{y + 13}">{escape(cell)}</text>')
    label = f"{plot.title}: {', '.join(names)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' aria-label="{escape(label)}"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _share(value: float, known: list[float], *, logarithmic: bool) -> float:
    """Of the room for a bar. A logarithmic one begins at half of the least."""
    if not logarithmic:
        return value / max(known)
    least = min(known) / 2
    return math.log(value / least) / math.log(max(known) / least) if value > least else 0.0


def drawn(text: str) -> dict[str, str]:
    """The plots of a Markdown text, by name."""
    all_tables = tables(text)
    found = {}
    for name, plot in PLOTS.items():
        table = next((one for one in all_tables if one and set(plot.columns) <= set(one[0])), None)
        if table is not None:
            found[name] = draw(plot, table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=HERE / "README.md")
    parser.add_argument("--to", type=Path, default=HERE / "plots")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn(options.file.read_text()).items():
        (options.to / f"{name}.svg").write_text(svg)
        print(options.to / f"{name}.svg")


if __name__ == "__main__":
    main()
