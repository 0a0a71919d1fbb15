"""`snapshotd compare`."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from snapshotd.api.experiments import AlignedCall, BranchInfo, CompareInfo, Difference, PairInfo
from snapshotd.cli.changes import change_json, change_line
from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.snapshots import snapshot_json
from snapshotd.cli.text import call_text, id_text, print_json, printable, status, table
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.results import SnapshotInfo
from snapshotd.terms import short

_SIGNS: dict[Difference, tuple[str, str]] = {
    "same": ("=", "the same call with the same outcome"),
    "arguments": ("~", "the same tool with other arguments"),
    "outcome": ("!", "the same call with another outcome"),
    "left": ("<", "a call that only the first one has"),
    "right": (">", "a call that only the other one has"),
}
_CHARS, _FILES = 60, 20


@declare(
    "compare",
    examples=[
        "snapshotd compare left right",
        "snapshotd compare --markdown a1b2c3 d4e5f6 >> $GITHUB_STEP_SUMMARY",
        "snapshotd compare --html report.html base try-1 try-2 try-3",
    ],
)
@click.option("--markdown", is_flag=True, help="Tables in Markdown.")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="One file that needs no other."
)
@json_option
@click.argument("refs", metavar="A B [C]...", nargs=-1, required=True, shell_complete=complete_snapshot)
def command(ctx: click.Context, refs: tuple[str, ...], markdown: bool, html: Path | None, as_json: bool) -> None:
    """Compare trajectories call by call: where they part, and how each came out.

    Any two or more trajectories or snapshots, related or not. Calls are aligned from the fork point: = the same, ~
    other arguments, ! another outcome, < and > only on one side. Then come status, calls, time, tokens and files, side
    by side; files compare each side's head with the fork point.

    With --json: {"fork_point","branches","pairs":[{"first_difference","calls","changes"}]}; a pair compares one more side
    with the first.
    """
    if markdown + as_json + (html is not None) > 1:
        refuse("--markdown, --html and --json exclude each other; choose one")
    if len(refs) < 2:
        refuse("there are at least two sides to a comparison; name another trajectory or snapshot")
    found = connect(ctx).compare(*refs)
    if markdown:
        click.echo(_markdown(found))
    elif html is not None:
        _html(found, html)
    else:
        show_comparison(found, as_json=as_json)


def show_comparison(found: CompareInfo, *, as_json: bool) -> None:
    """Print a comparison as text, or as JSON."""
    if as_json:
        print_json(_json(found))
    else:
        _text(found)


def _json(found: CompareInfo) -> dict[str, Any]:
    return {
        "fork_point": None if found.fork_point is None else snapshot_json(found.fork_point),
        "branches": [_branch_json(one) for one in found.branches],
        "pairs": [
            {
                "first_difference": None if pair.first_difference is None else _call_json(pair.first_difference),
                "calls": [_call_json(call) for call in pair.calls],
                "changes": [change_json(change) for change in pair.changes],
            }
            for pair in found.pairs
        ],
    }


def _branch_json(one: BranchInfo) -> dict[str, Any]:
    answer = dataclasses.asdict(one) | {"head": one.head.id}
    return {"call_count" if key == "calls" else key: value for key, value in answer.items()}


def _call_json(call: AlignedCall) -> dict[str, Any]:
    left, right = (None if side is None else snapshot_json(side) for side in (call.left, call.right))
    return {"number": call.number, "difference": call.difference, "left": left, "right": right}


def _text(found: CompareInfo) -> None:
    click.echo(_beginning(found))
    for other, pair in zip(found.branches[1:], found.pairs, strict=True):
        click.echo()
        table(*_calls(pair, found.branches[0], other))
        click.echo(_first(pair, found.branches[0], other))
        for line in _files(pair, found.branches[0], other):
            click.echo(f"  {line}")
    click.echo()
    table(*_outcomes(found))


def _beginning(found: CompareInfo) -> str:
    if found.fork_point is None:
        return "They have no snapshot in common; calls are aligned from the beginning."
    at = found.fork_point
    return f"Forked at {short(at.id)} (number {at.seq}, after {printable(at.tool.name)})."


def _calls(pair: PairInfo, left: BranchInfo, right: BranchInfo) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    left_title, right_title = _titles([left, right])
    rows: list[tuple[str, ...]] = [
        (_SIGNS[call.difference][0], str(call.number), _call_cell(call.left), _call_cell(call.right))
        for call in pair.calls
    ]
    if left.forked_with != right.forked_with:
        rows.insert(0, ("~", "", *(f"forked with {_variation_text(side)}" for side in (left, right))))
    return ("", "CALL", left_title.upper(), right_title.upper()), rows


def _call_cell(one: SnapshotInfo | None) -> str:
    if one is None:
        return ""
    text = call_text(one.tool.name, one.tool.arguments, _CHARS)
    code = "" if one.tool.exit_code is None else f" {one.tool.exit_code}"
    return f"{text}  {status(one.tool.status)}{code}"


def _variation_text(side: BranchInfo) -> str:
    text = printable(side.forked_with or "nothing else")
    return text if len(text) <= _CHARS else text[: _CHARS - 1] + "…"


def _first(pair: PairInfo, left: BranchInfo, right: BranchInfo) -> str:
    call = pair.first_difference
    if left.forked_with != right.forked_with:
        behind = "" if call is None else f"; then call {call.number}, {_SIGNS[call.difference][1]}"
        return f"First difference: what they were forked with{behind}."
    if call is None:
        return "All calls are the same." + ("" if pair.changes else " So are all files.")
    return f"First difference: call {call.number}, {_SIGNS[call.difference][1]}."


def _files(pair: PairInfo, left: BranchInfo, right: BranchInfo) -> list[str]:
    lines = [change_line(change) for change in pair.changes[:_FILES]]
    if len(pair.changes) > _FILES:
        heads = f"{short(left.head.id)} {short(right.head.id)}"
        lines.append(f"and {len(pair.changes) - _FILES} more: snapshotd diff {heads}")
    return lines


def _titles(branches: Sequence[BranchInfo]) -> list[str]:
    """Return a name for each branch, no two alike. Branches without a step of their own belong to one trajectory: they keep
    the reference that the user gave."""
    names = [printable(one.name or short(one.head.id)) for one in branches]
    return [
        name if names.count(name) == 1 else printable(id_text(one.ref, full=False))
        for name, one in zip(names, branches, strict=True)
    ]


def _outcomes(found: CompareInfo) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """One column for each side."""
    of = found.branches
    lines = [
        *([("forked with", [_variation_text(one) for one in of])] if any(one.forked_with for one in of) else []),
        ("head", [short(one.head.id) for one in of]),
        ("status", [status(one.status) for one in of]),
        ("exit code", ["-" if one.exit_code is None else str(one.exit_code) for one in of]),
        ("calls", [str(one.call_count) for one in of]),
        ("failed", [str(one.failed) for one in of]),
        ("time", [f"{one.seconds:.1f} s" for one in of]),
        ("tokens in, out", ["-" if not any(one.tokens) else "{:,}, {:,}".format(*one.tokens) for one in of]),
        ("files", [f"+{one.added} ~{one.changed} -{one.deleted}" for one in of]),
    ]
    return ("", *_titles(of)), [(name, *cells) for name, cells in lines]


def _markdown(found: CompareInfo) -> str:
    parts = [_beginning(found)]
    for other, pair in zip(found.branches[1:], found.pairs, strict=True):
        parts += [_markdown_table(*_calls(pair, found.branches[0], other)), _first(pair, found.branches[0], other)]
        if pair.changes:
            lines = map(click.unstyle, _files(pair, found.branches[0], other))
            parts.append("\n".join(["```", *lines, "```"]))
    return "\n\n".join([*parts, _markdown_table(*_outcomes(found))])


def _markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(click.unstyle(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def _html(found: CompareInfo, file: Path) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(record=True, width=160, file=io.StringIO())

    def show(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        shown = Table(*(Column(Text(cell)) for cell in header), expand=True)
        for row in rows:
            shown.add_row(*(Text.from_ansi(cell) for cell in row))
        console.print(shown)

    console.print(Text(_beginning(found)))
    for other, pair in zip(found.branches[1:], found.pairs, strict=True):
        show(*_calls(pair, found.branches[0], other))
        console.print(Text(_first(pair, found.branches[0], other)))
        for change in pair.changes:
            console.print(Text.from_ansi(change_line(change)))
    show(*_outcomes(found))
    page = console.export_html(inline_styles=True)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise click.UsageError(f"the page cannot be written to {file}: {exc.strerror}") from exc
