"""Rewind of files, of the agent's mind, and of both: what the preview says is what happens, and `undo` restores
exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.support import AGENT, Snap, host_manifest, wait_until

PROGRAM = (
    AGENT
    + """
from snapshotd.agent import state
import shutil

@tool(side_effect="irreversible", compensate=["sh", "-c", "echo undone >> /workspace/undone"])
def send(text):
    return "sent " + text

os.makedirs("kept/deep")
os.symlink("deep", "kept/link")
for name in ("one", "two", "three"):
    message("user", "say " + name)
    state["at"] = name
    shell("umask 027; echo %s > file; echo %s > %s; ln -f file hard-%s; chmod 4755 file; rm -rf kept/deep/*; touch kept/deep/%s"
          % ((name,) * 5))
    if name != "one":
        send(name)
message("assistant", "done")
shell("rm -r kept; mkdir kept; seq 100 > kept/numbers")
"""
)


class Line:
    """A finished trajectory, and all that can be known of it at a moment."""

    def __init__(self, snap: Snap, name: str, folder: Path) -> None:
        self.snap, self.name, self._folder = snap, name, folder
        self._looks = 0

    def steps(self, tool: str) -> list[str]:
        return [one["id"] for one in self.snap.json("log", self.name) if one["tool"]["name"] == tool]

    def files(self) -> dict[str, Any]:
        self._looks += 1
        to = self._folder / str(self._looks)
        self.snap("restore", self.name, "--path", "/workspace", "--to", to)
        return host_manifest(to)

    def mind(self) -> dict[str, Any]:
        return {
            "said": self.snap.json("show", "--conversation", self.name),
            "state": self.snap.json("state", self.name),
            "journal": [(one["id"], one["status"], one["snapshot"]) for one in self.snap.json("journal", self.name)],
            "tasks": self.snap.json("tasks", self.name),
        }

    def mind_at(self, snapshot: str) -> dict[str, Any]:
        return Line(self.snap, snapshot, self._folder).mind()

    def files_at(self, snapshot: str) -> dict[str, Any]:
        self._looks += 1
        folder = self._folder / f"of-{self._looks}"
        folder.mkdir()
        return Line(self.snap, snapshot, folder).files()


@pytest.fixture
def line(snap: Snap, runtime: str, tmp_path: Path) -> Iterator[Line]:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    snap("run", "--quiet", "--runtime", runtime, "--name", tmp_path.name, program)
    yield Line(snap, tmp_path.name, tmp_path)
    snap("rm", "--force", tmp_path.name)


@pytest.mark.parametrize("mode", long.some(["both", "files", "conversation"], 1))
def test_the_chosen_parts_go_back_as_previewed_and_undo_restores_them(line: Line, mode: str) -> None:
    snap, target = line.snap, line.steps("shell")[0]
    head = snap.json("log", line.name)[-1]["id"]
    files, mind = line.files(), line.mind()
    preview = snap.json("rewind", "--preview", f"--{mode}", line.name, target)
    assert (line.files(), line.mind()) == (files, mind), "a preview changes nothing"
    taken = snap.json("rewind", f"--{mode}", "--yes", line.name, target)
    _as_previewed(line, preview, head, taken["id"], mind, mode)
    assert line.files() == (files if mode == "conversation" else line.files_at(target))
    assert line.mind() == (mind if mode == "files" else line.mind_at(target))
    undone = snap.json("undo", line.name)
    assert (line.files(), line.mind()) == (files, mind)
    assert snap.json("diff", head, undone["id"]) == []
    assert [one["call"] for one in snap.json("effects", line.name)] == []
    snap("undo", line.name)  # an undo is undone as well
    assert line.files() == (files if mode == "conversation" else line.files_at(target))
    # What the sandbox itself sees, and that it goes on from there.
    seen = snap.manifest(line.name)
    assert seen == line.files()
    assert snap("undo", line.name, code=6).stderr.count("nothing to undo") == 1


def _as_previewed(line: Line, preview: dict[str, Any], head: str, taken: str, mind: dict[str, Any], mode: str) -> None:
    snap = line.snap
    changed = snap.json("diff", head, taken)
    assert preview["changes"] == changed
    assert preview["change_count"] == len(changed)
    assert bool(changed) == (mode != "conversation")
    kept = len(line.mind()["said"])
    assert preview["messages"] == mind["said"][kept:]
    assert len(preview["messages"]) == (0 if mode == "files" else 3)
    left = snap.json("effects", line.name)
    assert [one["call"] for one in preview["effects"]] == [one["call"] for one in left]
    assert [one["arguments"] for one in left] == ([] if mode == "files" else [{"text": "three"}, {"text": "two"}]), (
        "newest first"
    )
    parent = next(one for one in snap.json("log", line.name) if one["id"] == taken)
    assert parent["tool"]["arguments"] == {"to": line.steps("shell")[0], "mode": mode, "from": head}


def test_calls_that_cannot_be_undone_are_asked_about_and_compensated_once(line: Line) -> None:
    snap, target = line.snap, line.steps("shell")[0]
    refused = snap("rewind", line.name, target, code=2).stderr
    assert "cannot be undone" in refused
    assert "send" in refused
    rewound = snap.json("rewind", "--compensate", line.name, target)
    assert rewound["tool"]["name"] == "rewind"
    assert [one["compensated"] for one in snap.json("effects", line.name)] == ["done", "done"]
    compensations = line.steps("compensate")
    assert len(compensations) == 2
    assert snap("cat", f"{compensations[-1]}:/workspace/undone").stdout == "undone\nundone\n"
    snap("compensate", line.name)
    snap("undo", line.name)
    snap("rewind", "--compensate", line.name, target)
    assert len(line.steps("compensate")) == 2, "each at most once"


GUARDLESS = """
from snapshotd.agent import tool

def cancel(call):
    with open("/workspace/undone", "a") as file:
        file.write("undone\\n")

@tool
def note(text):
    return text

@tool(side_effect="irreversible", compensate=cancel)
def order(n):
    return n

@tool(side_effect="irreversible", compensate=["false"])
def pay(n):
    return n

note("first")
order(1)
GUARD
    pay(2)
"""


@pytest.mark.runc
def test_a_compensation_that_failed_is_not_passed_over(snap: Snap, tmp_path: Path) -> None:
    """And one whose file cannot be imported was not begun: once the file is mended, it runs."""
    program = tmp_path / "agent.py"
    program.write_text(GUARDLESS.replace("GUARD", "if len(__import__('sys').argv) > 1:"))
    snap("run", "--quiet", "--runtime", "runc", "--name", "orders", program)
    first = next(one["id"] for one in snap.json("log", "orders") if one["tool"]["name"] == "note")
    for _ in range(2):
        failed = snap("rewind", "--compensate", "orders", first, code=125)
        assert "did not begin" in failed.stderr
        assert snap.json("rewind", "--preview", "orders", first)["effects"][0]["compensated"] is None
    mended = (
        program.read_text()
        .replace('note("first")', "if __name__ == '__main__':\n  note('first')")
        .replace("order(1)", "  order(1)")
    )
    program.write_text(mended.replace("if len", "  if 0 and len"))
    snap("cp", program, "orders:/agent/agent.py")
    snap("rewind", "--compensate", "orders", first)
    assert [one["compensated"] for one in snap.json("effects", "orders")] == ["done"]
    snap("rm", "--force", "orders")

    program.write_text(GUARDLESS.replace("GUARD", "if True:"))
    snap("run", "--quiet", "--runtime", "runc", "--name", "orders", program)
    first = next(one["id"] for one in snap.json("log", "orders") if one["tool"]["name"] == "note")
    assert "failed with exit code 1" in snap("rewind", "--compensate", "orders", first, code=125).stderr
    before = [one["id"] for one in snap.json("log", "orders")]
    again = snap("rewind", "--compensate", "orders", first, code=6).stderr
    assert "the compensation of pay (" in again
    assert "by hand" in again
    assert "--yes" in again
    assert [one["id"] for one in snap.json("log", "orders")] == before
    snap("rewind", "--yes", "orders", first)
    snap("rm", "--force", "orders")


def test_where_a_rewind_cannot_go(line: Line) -> None:
    snap = line.snap
    other, start = snap.create("--runtime", "runc")
    changed = snap.sh(other, "echo other > other")["snapshot"]
    before = [one["id"] for one in snap.json("log", line.name)]
    assert "not of its history" in snap("rewind", "--conversation", "--yes", line.name, changed, code=6).stderr
    assert "ffffffffffff" in snap("rewind", "--yes", line.name, "ffffffffffff", code=4).stderr
    assert [one["id"] for one in snap.json("log", line.name)] == before
    snap("rewind", "--files", line.name, changed)
    assert snap.sh(line.name, "ls")["stdout"] == "other\n"
    running = snap.sh(line.name, "sleep 1000 >/dev/null 2>&1 & echo started")["snapshot"]
    assert "stop it first" in snap("rewind", "--yes", "--files", line.name, start, code=6).stderr
    assert snap.json("log", line.name)[-1]["id"] == running
    wait_until(
        lambda: all(one["state"] == "stored" for one in snap.json("log", line.name)),
        "what came from the other one is stored",
    )
    snap("rm", "--force", other)
