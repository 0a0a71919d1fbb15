"""The documentation does not point at what is not there: files, links, commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from snapshotd.cli.main import cli, find_commands
from snapshotd.client.local import profiles

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "cli.md"]
"""cli.md is generated from the commands themselves."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
INLINE = re.compile(r"`(?:\$ )?snapshotd ([^`\n]+)`")
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_LINE = re.compile(r"^\s*(?:\$ |sudo )?snapshotd (.+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z0-9-]*)")


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


def where_rows() -> list[tuple[str, list[str], list[str]]]:
    """The table "Where is ..." of docs/architecture.md: question, files, symbols."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| Question |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    return [(row[0].strip(), re.findall(r"`([^`]+)`", row[1]), re.findall(r"`([^`]+)`", row[2])) for row in rows]


@pytest.mark.parametrize(("question", "files", "symbols"), where_rows(), ids=lambda value: str(value)[:30])
def test_an_answer_is_in_two_files_at_most(question: str, files: list[str], symbols: list[str]) -> None:
    assert 1 <= len(files) <= 2, question
    assert symbols, question
    texts = [(ROOT / file).read_text() for file in files]
    for symbol in symbols:
        name = re.escape(symbol)
        defined = re.compile(rf"^\s*(?:def|class) {name}\b|^{name}\b.*=|^## {name}", re.MULTILINE)
        assert any(defined.search(text) for text in texts), f"{question}: {symbol} is not in {files}"


def test_the_questions_of_a_newcomer_are_answered() -> None:
    asked = [question for question, _, _ in where_rows()]
    for words in ("fsync", "`..`", "network", "third runtime", "new command", "fence", "prune", "diff", "output"):
        assert any(words in question for question in asked), words


def test_the_drawing_of_a_tool_call_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawing = page.partition("## The way of a tool call")[2].partition("```\n")[2].partition("```")[0]
    folder, seen = "", 0
    for word in re.findall(r"[a-z_/]+(?:/|\.py)(?=[ \n)])", drawing):
        if word.endswith("/"):
            folder = word.removeprefix("snapshotd/")
            continue
        seen += 1
        assert any((ROOT / "snapshotd" / place / word).exists() for place in ("agent", folder)), f"{folder}{word}"
    assert seen > 20


THREAD = re.compile(
    r"""(?:Thread|Listening)\([^()]*(?:\([^()]*\)[^()]*)*name=f?"([a-z-]+)|ThreadPoolExecutor\([^()]*"([a-z-]+)"\)|apart\("([a-z-]+)\""""
)


def test_every_thread_is_on_the_page_about_concurrency() -> None:
    page = (ROOT / "docs" / "concurrency.md").read_text()
    sources = [path for path in (ROOT / "snapshotd").rglob("*.py") if "testing" not in path.parts]
    names = {name for path in sources for found in THREAD.findall(path.read_text()) for name in found if name}
    assert len(names) > 25
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_page_about_contributing_names_files_that_exist() -> None:
    """Also those that begin in the package or in the tests; NAME and FOLDER stand for any."""
    paths = re.findall(r"`([\w-]+(?:/[\w.-]+)+/?)`", (ROOT / "CONTRIBUTING.md").read_text())
    named = [path for path in paths if not re.search("NAME|FOLDER", path)]
    assert len(named) > 40
    tops = (ROOT, ROOT / "snapshotd", ROOT / "tests")
    assert [path for path in named if not any((top / path).exists() for top in tops)] == []


OPENING = re.compile(
    r"(?:^ ?|[.!?:] |^[-*] |^\d+\. |\*\* ?|\| )\**((?:Of|What|Who|Whoever|Those|Nobody|Whether)\b[^.|]{0,50})",
    re.MULTILINE,
)
"""Words that make a sentence hard to read when it begins with them."""


@pytest.mark.parametrize(
    "page", [*WRITTEN, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name
)
def test_no_sentence_begins_with_a_riddle(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "code", FENCED.sub("", page.read_text()))
    sentences = re.sub(r"\n(?![\n#|\-*\d])", " ", prose)
    assert [found for found in OPENING.findall(sentences) if not found.rstrip().endswith("?")] == []


@pytest.mark.parametrize(("name", "least"), [("agents", 11), ("client", 1), ("fleet", 1), ("integrations", 5)])
def test_pages_quote_their_examples_as_they_are(name: str, least: int) -> None:
    folder = ROOT / "docs" / name
    pages, up = (sorted(folder.glob("*.md")), "../") if folder.is_dir() else ([folder.with_suffix(".md")], "")
    page = "".join(path.read_text() for path in pages)
    blocks = FENCED.findall(page)
    files = sorted(path for path in (ROOT / "docs" / "examples" / name).iterdir() if path.is_file())
    assert len(files) >= least
    for path in files:
        assert f"]({up}examples/{name}/{path.name})" in page, f"{path.name} is not linked"
        assert path.read_text() in blocks, f"{path.name} is not quoted as it is"


def command_lines(text: str) -> Iterator[str]:
    """Every `snapshotd ...` in code, up to what belongs to the agent or another program."""
    known = "|".join(profiles.names())
    blocks = "\n".join(FENCED.findall(text))
    for line in (*INLINE.findall(text), *BLOCK_LINE.findall(blocks)):
        yield re.split(rf" -- | [|>&]|\s#|  |\.py | (?:{known}) ", line)[0]


EXECUTED = {
    "access.md": "test_access_doc.py",
    "agents/*.md": "test_agents_doc.py",
    "branching-http.md": "test_branching_http_doc.py",
    "commands.md": "test_commands_doc.py",
    "ci.md": "test_ci.py",
    "install.md": "test_install_doc.py",
    "integrations/e2b.md": "test_e2b.py",
    "integrations/mcp.md": "test_mcp.py",
    "examples/ci/job.sh": "test_ci.py",
}
"""What tests of `tests/e2e` run as it stands, and the test: the `console` blocks of pages, all of a recipe for CI."""

ON_NO_PAGE = {
    "catalog": "needs a database: tests/contract/test_catalog_migration.py has a real one",
    "fleet": "needs a database: tests/unit/cli/test_fleet.py has a real one",
    "mcp": "speaks a protocol to a program: tests/e2e/test_mcp.py is that program",
    "setup": "installs packages on the machine that runs the tests",
    "ui": "tests/e2e/test_page.py drives it in a browser",
}
"""Commands that no test runs from a page."""


def test_every_command_is_on_a_page_that_tests_run() -> None:
    shown: set[str] = set()
    for pattern, test in EXECUTED.items():
        assert Path(pattern).name.replace("*.md", "agents") in (ROOT / "tests" / "e2e" / test).read_text(), pattern
        for page in (ROOT / "docs").glob(pattern):
            text = page.read_text()
            blocks = re.findall(r"^```(?:console|bash|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
            console = [line for block in blocks for line in re.findall(r"^[$>] (.*)$", block, re.MULTILINE)]
            typed = (
                "\n".join(console or blocks) if page.suffix == ".md" else re.sub(r"^#.*", "", text, flags=re.MULTILINE)
            )
            shown |= set(re.findall(r"(?:^|[;&|(] ?)snapshotd ([a-z]+)", typed, re.MULTILINE))
    assert len(shown) > 50
    assert sorted(find_commands().keys() - shown - ON_NO_PAGE.keys()) == [], "show it in docs/commands.md"
    assert ON_NO_PAGE.keys() <= find_commands().keys() - shown


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for line in command_lines(page.read_text()):
        name, *rest = line.split()
        if not re.fullmatch(r"[a-z]+", name):
            continue  # prose: "snapshotd ... --json"
        assert name in find_commands(), line
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group):
            assert rest, line
            command = command.get_command(click.Context(command), rest[0])
            assert command is not None, line
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = [option for word in rest for option in OPTION.findall(word)[:1] if word.startswith("-")]
        assert set(used) <= known | {"--help"}, line


def test_every_integration_is_in_the_suites_that_ci_runs() -> None:
    suites = (ROOT / "Makefile").read_text().partition("\nSUITES := ")[2].partition("\nsuites:")[0]
    files = re.search(r"tests/e2e/test_%\.py,([\w\s\\]+)\)", suites)[1].replace("\\", " ").split()  # type: ignore[index]
    assert [name for name in files if not (ROOT / f"tests/e2e/test_{name}.py").exists()] == []
    pages = [page.stem.replace("-", "_") for page in (ROOT / "docs" / "integrations").glob("*.md")]
    assert len(pages) > 10
    assert [page for page in pages if not any(name.startswith(page) for name in files)] == []
    assert "sudo make suites" in (ROOT / ".github/workflows/test.yml").read_text()
