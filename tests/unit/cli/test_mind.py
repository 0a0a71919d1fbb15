"""The commands of the agent's mind: what they print, on which stream, with which exit code, what they ask and what they
refuse."""

from __future__ import annotations

import base64
import json
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotd.cli.follow import ReplayLine
from snapshotd.types import short
from tests.unit.cli.conftest import Cli
from tests.unit.cli.terminals import edit_on_terminal
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon, environment


@pytest.fixture
def run(cli: Cli) -> str:
    """The id of a run that was stopped in the middle, after three calls."""
    made = cli("run", "-d", "--", "sh", "-c", "for i in 1 2 3; do effect $i; done; exec forever").out.strip()
    eventually(lambda: [entry["status"] for entry in calls(cli, made)] == ["done"] * 3)
    assert cli("stop", made).code == 0
    return made


def calls(cli: Cli, ref: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cli("journal", "--json", ref).json
    return found


def on_terminal(daemon: Daemon, words: list[str], typed: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command line with a terminal as standard input, on which that is typed."""
    ours, theirs = pty.openpty()
    with open(ours, "wb", buffering=0) as terminal, open(theirs, "rb", buffering=0) as stdin:
        terminal.write(typed.encode())
        argv = [sys.executable, "-m", "snapshotd", *words]
        env = {**environment(daemon), **more}
        return subprocess.run(argv, env=env, stdin=stdin, capture_output=True, text=True, check=False, timeout=60)


# -- journal, state, tasks ---------------------------------------------------------------------------------------------


def test_the_journal_as_a_table_and_whole(cli: Cli, box: str) -> None:
    cli("exec", box, "--", "effect", "send")
    cli("exec", box, "--", "cutoff", "pay")
    header, sent, paid = cli("journal", box).out.splitlines()
    assert header.split() == ["POSITION", "CALL", "KIND", "NAME", "SIDE", "EFFECT", "STATUS", "SNAPSHOT", "ARGUMENTS"]
    whole = calls(cli, box)
    assert sent.split()[:6] == ["0", short(whole[0]["id"]), "tool", "send", "irreversible", "done"]
    assert sent.split()[6] == short(whole[0]["snapshot"])
    assert paid.split()[3] == "pay"
    assert list(whole[1]) == [
        "position",
        "id",
        "kind",
        "name",
        "arguments",
        "side_effect",
        "key",
        "status",
        "started_at",
        "ended_at",
        "result",
        "error",
        "facts",
        "details",
        "parent",
        "snapshot",
    ]
    assert [entry["position"] for entry in whole] == [0, 1]
    assert cli("journal", "nobody").code == 4


def test_state_and_tasks(cli: Cli, box: str) -> None:
    assert cli("state", box).out == "{}\n"
    cli("exec", box, "--", "remember", "note", '"ü\\u009b31m"')
    assert cli("state", box).out == '{\n  "note": "ü\\u009b31m"\n}\n', "no terminal takes it for a command"
    assert cli("state", "--json", box).json == {"note": "ü\x9b31m"}
    cli("exec", box, "--", "plan", "plan", "build")
    header, plan, build = cli("tasks", box).out.splitlines()
    assert header.split() == ["TASK", "STATUS", "DEPENDS", "ON", "BEGAN", "ENDED", "NOTE"]
    assert plan.split()[:3] == ["plan", "completed", "-"]
    assert build.split()[:3] == ["build", "completed", "plan"]
    assert [list(task) for task in cli("tasks", "--json", box).json] == [
        ["name", "status", "depends", "note", "started_in", "ended_in"]
    ] * 2


# -- resume ------------------------------------------------------------------------------------------------------------


def test_a_resume_counts_what_is_replayed_and_follows_the_rest(cli: Cli, run: str, shared_daemon: Daemon) -> None:
    assert cli("resume", "--detach", "--json", run).json == {"trajectory": run}
    told = shared_daemon.client.events
    eventually(lambda: [event["event"] for event in told(run, follow=False)].count("replayed") == 3)
    shared_daemon.client.stop(run)
    lines = cli("attach", run).err.splitlines()
    assert lines[0].startswith("▶ trajectory ")
    assert any(line.startswith("↻ 3 calls replayed") for line in lines)
    events = [json.loads(line) for line in cli("attach", "--json", run).out.splitlines()]
    assert [event["event"] for event in events].count("replayed") == 3
    assert cli("resume", "-d", run).out == f"{run}\n"
    shared_daemon.client.stop(run)


def test_an_undecided_call_is_a_question_with_three_answers(cli: Cli, tmp_path: Path) -> None:
    run = cli("run", "-d", "--", "sh", "-c", "cutoff pay; cutoff mail; exec forever").out.strip()
    eventually(lambda: len(calls(cli, run)) == 2)
    cli("stop", run)
    refused = cli("resume", run)
    assert (refused.code, refused.out) == (14, "")
    for answer in ("pay", "--retry CALL", "--skip CALL", "--result CALL=FILE"):
        assert answer in refused.err
    assert cli("resume", "--json", run).json["error"]["code"] == "Undecided"
    pay, mail = (entry["id"] for entry in calls(cli, run))
    (tmp_path / "result.json").write_text('{"ok": true}')
    done = cli("resume", "-d", run, "--skip", pay, "--result", f"{mail[:8]}={tmp_path}/result.json")
    assert done.code == 0, done.err
    assert [entry["result"] for entry in calls(cli, run)] == [None, {"ok": True}]
    assert cli("stop", run).code == 0


def test_what_cannot_be_resumed(cli: Cli, box: str, tmp_path: Path) -> None:
    assert cli("resume", box).code == 2
    (tmp_path / "broken").write_text("{")
    mistakes = {
        ("resume", box, "--result", "abcd"): "CALL=FILE",
        ("resume", box, "--result", f"abcd={tmp_path}/none"): "No such file",
        ("resume", box, "--result", f"abcd={tmp_path}/broken"): "is not JSON",
        ("resume", box, "--skip", "abcd", "--retry", "abcd"): "decided twice",
        ("resume", box, "--skip", "abcd", "--result", f"abcd={tmp_path}/broken"): "is not JSON",
        ("fork", "--resume", box): "no program that could",
    }
    for words, sentence in mistakes.items():
        done = cli(*words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert sentence in done.err


def test_forks_resume(cli: Cli, run: str) -> None:
    assert len(cli("fork", "--resume", run, "--n", "2").out.split()) == 2


def test_replayed_calls_are_one_line_that_counts_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    replay = ReplayLine()
    for _ in range(300):
        assert replay.line({"event": "replayed", "name": "x"}) is None
    assert (
        replay.line({"event": "live", "snapshot": "a" * 32, "replayed": 300})
        == "↻ 300 calls replayed; live from aaaaaaaaaaaa"
    )
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert shown.endswith("↻ 300 calls replayed\r\x1b[K")
    replay.line({"event": "replayed", "name": "x"})
    assert replay.line({"event": "finished"}) == "↻ 1 call replayed", "it ended before it was live"
    assert replay.line({"event": "finished"}) is None


# -- rewind, undo, effects ---------------------------------------------------------------------------------------------


def test_a_rewind_of_files_and_mind_and_its_undo(cli: Cli, box: str) -> None:
    first = cli("log", "-q", "--no-trunc", box).out.strip()
    cli("exec", box, "--", "ls")
    for option, mode in (
        ((), "both"),
        (("--both",), "both"),
        (("--files",), "files"),
        (("--conversation",), "conversation"),
    ):
        done = cli("rewind", box, first, *option, "--json")
        assert done.json["tool"]["arguments"]["mode"] == mode, done.err
    assert cli("undo", box).err.startswith("● 6 ")
    assert cli("undo", "--json", "--wait", "stored", box).json["state"] == "stored"
    cli("exec", box, "--", "ls")
    assert cli("undo", box).code == 6
    assert cli("show", "--json", box).json["id"] != first


def test_a_preview_changes_nothing(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    cli("exec", box, "--", "sh", "-c", "touch a b; effect send; snapshotd-agent message assistant 'to go\x1b[31m'")
    before = cli("log", "-q", "--no-trunc", box).out
    shown = cli("rewind", "--preview", box, first)
    assert shown.code == 0
    *lines, effect = shown.out.splitlines()
    assert lines == [
        f"{box} from {cli('log', '-q', box).out.split()[-1]} to {first}: files and the agent's mind",
        "files that change: 2",
        "  D /workspace/a",
        "  D /workspace/b",
        "messages that go: 1",
        "  assistant: to go\\x1b[31m",
        "calls that cannot be undone: 1",
    ]
    assert effect.split()[:2] == [short(calls(cli, box)[0]["id"]), "send"]
    assert effect.endswith("done  no  undo send")
    preview = cli("rewind", "--preview", "--json", "--conversation", box, first).json
    assert list(preview) == ["head", "target", "rewinds", "changes", "change_count", "messages", "effects", "untouched"]
    assert (preview["changes"], preview["rewinds"], len(preview["effects"])) == ([], "conversation", 1)
    assert cli("log", "-q", "--no-trunc", box).out == before


def test_irreversible_calls_are_not_left_behind_by_accident(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    cli("exec", box, "--", "effect", "send")
    for words in (("rewind", box, first), ("rewind", "--conversation", "--json", box, first)):
        refused = cli(*words)
        assert refused.code == 2
        assert "send (" in refused.err
        assert "--compensate or --yes" in refused.err
    assert cli("rewind", "--files", box, first).code == 0, "the mind goes on, so nothing is left behind"
    assert cli("rewind", "--yes", box, first).code == 0
    assert [item["compensated"] for item in cli("effects", "--json", box).json] == [None]


def test_a_rewind_compensates_if_told(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    cli("exec", box, "--", "effect", "send")
    assert cli("rewind", "--compensate", box, first).code == 0
    assert [item["compensated"] for item in cli("effects", "--json", box).json] == ["done"]
    cli("exec", box, "--", "effect", "bad")
    failed = cli("rewind", "--compensate", box, first)
    assert (failed.code, "failed with exit code 1" in failed.err) == (125, True)


@pytest.mark.parametrize(("answer", "code", "snapshots"), [("y\n", 0, 4), ("\n", 1, 3), ("n\n", 1, 3)])
def test_a_rewind_asks_on_a_terminal(daemon: Daemon, answer: str, code: int, snapshots: int) -> None:
    line, first = daemon.client.create(name="box")
    daemon.client.exec(line.id, ["effect", "send"])
    done = on_terminal(daemon, ["rewind", "box", first.id], answer)
    assert done.returncode == code, done.stderr
    assert "calls that cannot be undone: 1" in done.stdout
    assert "Rewind all the same? [y/N]" in done.stderr
    assert len(daemon.client.log("box")) == snapshots


def test_a_rewind_that_leaves_nothing_behind_asks_nothing(daemon: Daemon) -> None:
    line, first = daemon.client.create(name="box")
    daemon.client.exec(line.id, ["ls"])
    done = on_terminal(daemon, ["rewind", "box", first.id])
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("● 2 ")


def test_a_fork_is_promoted(cli: Cli, box: str) -> None:
    (fork,) = cli("fork", "--json", box).json["trajectories"]
    cli("exec", fork, "--", "ls")
    taken = cli("promote", fork, "--json").json
    assert (taken["tool"]["name"], taken["tool"]["arguments"]["branch"]) == ("promote", fork)
    refused = cli("promote", fork)
    assert (refused.code, "--yes" in refused.err) == (6, True)
    assert cli("promote", "--into", box, "--yes", fork).err.startswith("● 2 ")
    assert cli("promote", "--wait", "stored", "--compensate", fork, "--json").json["state"] == "stored"
    assert cli("undo", box).err.startswith("● 4 ")
    assert cli("promote", box).code == 6


def test_effects_and_their_compensations(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    cli("exec", box, "--", "effect", "send")
    cli("exec", box, "--", "effect", "bad")
    assert cli("effects", box).out.splitlines()[1:] == []
    cli("rewind", "--yes", box, first)
    header, bad, sent = cli("effects", box).out.splitlines()
    assert header.split() == ["CALL", "NAME", "ARGUMENTS", "STATUS", "COMPENSATED", "COMPENSATION"]
    assert bad.split()[1] == "bad"
    assert sent.split()[-4:] == ["done", "no", "undo", "send"]
    done = cli("compensate", box, sent.split()[0])
    assert done.code == 0, done.err
    assert cli("effects", box).out.splitlines()[2].split()[-4:] == ["done", "done", "undo", "send"]
    rest = cli("compensate", "--json", box)
    assert (rest.code, "failed with exit code 1" in rest.err) == (125, True)
    assert cli("compensate", box, "ffffffff").code == 4


def test_a_task_is_retried(cli: Cli, box: str) -> None:
    cli("exec", box, "--", "plan", "plan")
    assert cli("retry", box, "plan").code == 2, "there is no program that could go on"
    taken = cli("retry", "--no-compensate", "--no-resume", "--json", box, "plan")
    assert (taken.json["tool"]["name"], taken.err) == ("retry", "")
    assert cli("tasks", "--json", box).json == []
    assert cli("retry", "--no-resume", box, "none").code == 4


def test_exec_for_one_head_only(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    assert cli("exec", "--if-head", first, box, "--", "ls").code == 0
    refused = cli("exec", "--if-head", first, box, "--", "ls")
    assert refused.code == 125
    assert cli("log", "-q", box).out.split()[-1] in refused.err
    assert "snapshotd fork" in refused.err
    assert cli("exec", "--if-head", first, "--snapshot", first, "--", "ls").code == 125


# -- edit --------------------------------------------------------------------------------------------------------------


def test_an_edit_by_options(cli: Cli, box: str, tmp_path: Path) -> None:
    cli("exec", box, "--", "remember", "old", "1")
    cli("exec", box, "--", "touch", "ran")
    (tmp_path / "new.bin").write_bytes(b"\x00\xff")
    made = cli(
        "edit",
        box,
        "--file",
        f"b.bin={tmp_path}/new.bin",
        "--remove",
        "ran",
        "--message",
        "user=a=b",
        "--state",
        "n=[1]",
        "--state",
        "old=null",
        "--env",
        "A=1",
        "--name",
        f"{box}-2",
    )
    assert made.code == 0, made.err
    new = made.out.strip()
    assert new in cli("ls", "-q", "--no-trunc").out.split()
    assert base64.b64decode(cli("cat", "--json", f"{new}:b.bin").json["content_b64"]) == b"\x00\xff"
    assert cli("cat", f"{new}:ran").code == 4
    assert cli("show", "--conversation", "--json", new).json == [{"role": "user", "content": "a=b"}]
    assert cli("state", "--json", new).json == {"n": [1]}
    assert cli("exec", "-q", new, "--", "sh", "-c", "echo $A").out == "1\n"
    (tmp_path / "all.json").write_text('[{"role": "user", "content": {"x": 1}}]')
    again = cli("edit", f"{box}-2", "--messages", f"{tmp_path}/all.json", "--json", "--wait", "stored").json
    assert again["state"] == "stored"
    assert cli("show", "--conversation", "--json", again["trajectory"]).json == [{"role": "user", "content": {"x": 1}}]


def test_edits_that_make_no_sense(cli: Cli, box: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"role": "user"}')
    mistakes = {
        (): "nothing is to be changed",
        ("--file", "a"): "PATH=FILE",
        ("--file", f"a={tmp_path}/none"): "No such file",
        ("--file", f"a={tmp_path}/x.json", "--remove", "a"): "written and removed",
        ("--message", "text"): "ROLE=TEXT",
        ("--messages", f"{tmp_path}/x.json"): 'not an array of {"role", "content"}',
        ("--messages", f"{tmp_path}/x.json", "--drop-messages", "1"): "nothing to drop",
        ("--state", "k=text"): "is not JSON",
        ("--drop-messages", "-1"): "whole number",
        ("--env", "A=1", "--resume"): "no program that could",
    }
    for words, sentence in mistakes.items():
        done = cli("edit", box, *words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), words
        assert sentence in done.err


def editor(tmp_path: Path, *commands: str) -> str:
    """A program that edits what it is given as the next of these Python statements says; `d` is the document, `t` its
    text."""
    path = tmp_path / "editor.py"
    turns = "\n".join(f"if turn == {i}:\n    {each}" for i, each in enumerate(commands))
    path.write_text(
        "import json, pathlib, sys\n"
        "p, n = pathlib.Path(sys.argv[1]), pathlib.Path(__file__ + '.turn')\n"
        "turn = int(n.read_text()) if n.exists() else 0\nn.write_text(str(turn + 1))\n"
        "t = p.read_text()\nd = json.loads(t) if turn == 0 else None\n"
        f"{turns}\n"
        "p.write_text(t if d is None else json.dumps(d))\n"
    )
    return f"{sys.executable} {path}"


def test_an_edit_in_the_editor(edited: Daemon, tmp_path: Path) -> None:
    change = "d['messages'][1]['content'] = 'ü'; d['state'] = {'n': True}"
    code, said = edit_on_terminal(edited, editor(tmp_path, change), "", "--name", "made")
    assert code == 0, said
    client = edited.client
    assert [message.content for message in client.conversation("made")] == ["fix it", "ü"]
    assert client.state("made") == {"n": True}


def test_an_editor_that_changes_nothing_makes_nothing(edited: Daemon, tmp_path: Path) -> None:
    code, said = edit_on_terminal(edited, editor(tmp_path, "d = None"))
    assert (code, "nothing was made" in said) == (0, True)
    code, said = edit_on_terminal(edited, editor(tmp_path, "pass", "pass"))
    assert (code, "nothing was made" in said) == (0, True), "only its form is another"
    assert len(edited.client.trajectories()) == 1


def test_broken_json_can_be_mended(edited: Daemon, tmp_path: Path) -> None:
    turns = ["t = '{\"messages\": []'; d = None", "t += ',}'", "t = t.rstrip()[:-2] + ', \"state\": {}}'"]
    code, said = edit_on_terminal(edited, editor(tmp_path, *turns), "yy")
    assert code == 0, said
    assert said.count("is not JSON") == 2
    new = next(line for line in edited.client.trajectories() if line.name != "box")
    assert (edited.client.conversation(new.id), edited.client.state(new.id)) == ([], {})


def test_giving_up_in_the_editor(edited: Daemon, tmp_path: Path) -> None:
    code, said = edit_on_terminal(edited, editor(tmp_path, "d['messages_before'] = 7"), "n")
    assert (code, "cannot be changed" in said, "nothing was changed" in said) == (1, True, True)
    assert len(edited.client.trajectories()) == 1
