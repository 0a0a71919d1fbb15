"""The documentation does not point at what is not there: files, links, commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from snapshotd.cli.main import FOLDERS, cli

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "cli.md"]
"""cli.md is generated from the commands themselves."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
INLINE = re.compile(r"`(?:\$ )?snapshotd ([^`\n]+)`")
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_LINE = re.compile(r"^\s*(?:\$ |sudo )?snapshotd (.+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")


def finder_rows() -> list[tuple[str, list[str]]]:
    """The README's table "I want to know ... open ...": question and the paths to open."""
    table = README.read_text().partition("| I want to know")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [(row[0].strip(), re.findall(r"`([^`]+)`|\]\(([^)]+)\)", row[1])) for row in rows]  # type: ignore[misc]


def test_the_finder_table_leads_to_existing_paths() -> None:
    rows = finder_rows()
    assert len(rows) >= 10
    for question, found in rows:
        paths = [path for pair in found for path in pair if path]
        assert paths, question
        for path in paths:
            assert (ROOT / path).exists(), f"{question}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize(("name", "least"), [("agents", 11), ("client", 1)])
def test_a_page_quotes_its_examples_as_they_are(name: str, least: int) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks = FENCED.findall(page)
    files = sorted(path for path in (ROOT / "docs" / "examples" / name).iterdir() if path.is_file())
    assert len(files) >= least
    for path in files:
        assert f"](examples/{name}/{path.name})" in page, f"{path.name} is not linked"
        assert path.read_text() in blocks, f"{path.name} is not quoted as it is"


def command_lines(text: str) -> Iterator[str]:
    """Every `snapshotd ...` in code, up to what belongs to the agent or another program."""
    blocks = "\n".join(FENCED.findall(text))
    for line in (*INLINE.findall(text), *BLOCK_LINE.findall(blocks)):
        yield re.split(r" -- | [|>&]|\s#|  |\.py ", line)[0]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for line in command_lines(page.read_text()):
        name, *rest = line.split()
        if not re.fullmatch(r"[a-z]+", name):
            continue  # prose: "snapshotd ... --json"
        assert name in FOLDERS, line
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group):
            assert rest, line
            command = command.get_command(click.Context(command), rest[0])
            assert command is not None, line
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = [option for word in rest for option in OPTION.findall(word)[:1] if word.startswith("-")]
        assert set(used) <= known | {"--help"}, line
