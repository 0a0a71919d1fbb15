"""Outputs, summary and annotations of a step, whatever a sandbox puts into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.cli.github import GitHub
from snapshotd.errors import UsageError
from tests.unit.cli.conftest import Cli


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("output", "step_summary"):
        monkeypatch.setenv(f"GITHUB_{name.upper()}", str(tmp_path / name))
    return tmp_path


def outputs(path: Path) -> dict[str, str]:
    """As the runner reads them."""
    found, lines = {}, iter(path.read_text().splitlines())
    for line in lines:
        name, mark = line.split("<<")
        value = []
        for more in lines:
            if more == mark:
                break
            value.append(more)
        found[name] = "\n".join(value)
    return found


def test_values_cannot_end_their_block(step: Path) -> None:
    GitHub().outputs({"hit": True, "key": "a<<b\nevil=1\nc<<EOF\nEOF", "count": 3})
    GitHub().outputs({"later": False})
    assert outputs(step / "output") == {
        "hit": "true",
        "key": "a<<b\nevil=1\nc<<EOF\nEOF",
        "count": "3",
        "later": "false",
    }


def test_a_summary_shows_text_as_text(step: Path) -> None:
    GitHub().summary("run `x`\n# no heading", {"<b>": "a|b [link](http://x)"}, "</pre><img src=x>")
    text = (step / "step_summary").read_text()
    assert "\n# no heading" not in text
    assert "<b>" not in text
    assert "a\\|b \\[link\\]" in text
    assert "&lt;/pre&gt;&lt;img" in text


def test_an_annotation_is_one_line(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GitHub().annotate("error", "50%\n::set-env name=x::y\r", title="a: b, c", file="x.py", line="3", other=None)
    assert capsys.readouterr().err == "::error title=a%3A b%2C c,file=x.py,line=3::50%25%0A::set-env name=x::y%0D\n"


def test_outside_of_a_step_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    with pytest.raises(UsageError, match="GITHUB_OUTPUT is not set"):
        GitHub()


def test_a_command_that_fails_in_a_step_is_an_annotation(step: Path, cli: Cli, box: str) -> None:
    (step / "full").mkdir()
    (step / "full" / "file").touch()
    for words, why in (
        (["restore", "nothing", "--to", str(step / "out")], "nothing"),
        (["restore", box, "--to", str(step / "full")], "is not an empty directory"),
        (["exec", box, "--", "missing"], "there is no program missing"),
        (["tag", "nothing", "best"], "nothing"),
    ):
        failed = cli(words[0], "--github", *words[1:])
        assert failed.code != 0
        line, message = failed.err.splitlines()
        assert line.startswith(f"::error title=snapshotd {words[0]}::")
        assert why in line
        assert message == "snapshotd: " + line.split("::", 2)[2]
    assert (
        cli("restore", "--json", "--github", "nothing", "--to", str(step / "out")).json["error"]["code"] == "NotFound"
    )
