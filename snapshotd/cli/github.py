"""Outputs of a step of GitHub Actions, its summary, and annotations.

A workflow's files are named by GITHUB_OUTPUT and GITHUB_STEP_SUMMARY; annotations are lines on standard error that the
runner reads. Values come out of sandboxes, so none can end its line or its block early.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Mapping
from typing import Literal

import click

from snapshotd.config import read_variables
from snapshotd.errors import UsageError

Level = Literal["notice", "warning", "error"]
_ANNOTATION_CHARS = 4000


class GitHub:
    """The step that this process runs in."""

    def __init__(self) -> None:
        """UsageError: it runs in none."""
        self._outputs, self._summary = (_file(name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"))

    def outputs(self, values: Mapping[str, object]) -> None:
        """Set outputs of the step. True and False are written as a workflow's expressions compare them."""
        lines = []
        for name, value in values.items():
            text, mark = str(value).lower() if isinstance(value, bool) else str(value), f"end-{os.urandom(16).hex()}"
            lines.append(f"{name}<<{mark}\n{text}\n{mark}\n")
        _append(self._outputs, "".join(lines))

    def warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            self.annotate("warning", warning)

    def summary(self, heading: str, rows: Mapping[str, object], detail: str = "") -> None:
        """Add a heading, a table of two columns, and a text that is folded in to the step's summary."""
        text = f"### {_cell(heading)}\n\n|  |  |\n|---|---|\n"
        text += "".join(f"| {_cell(name)} | {_cell(str(value))} |\n" for name, value in rows.items())
        if detail:
            text += (
                f"\n<details><summary>Output</summary>\n\n<pre>{html.escape(detail, quote=False)}</pre>\n</details>\n"
            )
        _append(self._summary, text + "\n")

    def annotate(self, level: Level, message: str, **where: str | None) -> None:
        """Print an annotation, which the runner shows. `where`: title, file, line."""
        named = ",".join(f"{name}={_property(value)}" for name, value in where.items() if value)
        text = message[:_ANNOTATION_CHARS].encode(errors="backslashreplace").decode()
        click.echo(f"::{level}{' ' if named else ''}{named}::{_data(text)}", err=True)


github_option = click.option(
    "--github",
    is_flag=True,
    callback=lambda _ctx, _param, value: GitHub() if value else None,
    help="In a step of GitHub Actions: write its outputs and summary, and annotate failures.",
)
"""--github, as the parameter `github`: None without it."""


def _file(name: str) -> str:
    path = read_variables([name]).get(name)
    if not path:
        raise UsageError(f"--github is for a step of GitHub Actions, and {name} is not set; leave it out elsewhere")
    return path


def _append(path: str, text: str) -> None:
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as exc:
        raise UsageError(f"{path} cannot be written: {exc.strerror}; leave --github out") from exc


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    escaped = html.escape(" ".join(text.split()), quote=False)
    for sign in "\\`*_[]|~":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped
