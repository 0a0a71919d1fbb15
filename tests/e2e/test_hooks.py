"""Agents in a folder of the machine, without a sandbox: hooks as agents send them, rewinds, and what stays untouched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hooked import SEND, Claude
from tests.e2e.support import Snap, wait_until
from tests.leftovers import nothing_left

NOBODY = 65534


@pytest.fixture
def claude(empty_snap: Snap, tmp_path: Path) -> Iterator[Claude]:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print(1)\n")
    (folder / "notes").write_text("mine\n")
    (folder / ".gitignore").write_text("*.log\nbuild/\n!keep.log\n")
    yield Claude(empty_snap, folder)
    for line in empty_snap.json("ls"):  # the next test looks through all that there are
        empty_snap("rm", "--force", line["id"])


def test_each_call_has_a_snapshot_with_what_its_command_changed(claude: Claude) -> None:
    claude.hook("SessionStart", source="startup")
    claude.says("do it")
    claude.call("echo 2 > src/two; sed -i s/1/2/ src/main.py")
    (claude.folder / "notes").write_text("a person writes\n")
    claude.call("rm -r src; mkdir empty; ln -s ../outside link")
    claude.call("echo x > half; exit 3")
    claude.call("true")
    assert claude.names() == ["start", "edits", "prompt", "Bash", "edits", "Bash", "Bash", "Bash"]
    steps = claude.steps()
    assert claude.changes(steps[1]["id"]) == [
        "A /workspace/",
        "A /workspace/.gitignore",
        "A /workspace/notes",
        "A /workspace/src/",
        "A /workspace/src/main.py",
    ]
    assert claude.changes(steps[3]["id"]) == ["M /workspace/src/main.py", "A /workspace/src/two"]
    assert claude.changes(steps[4]["id"]) == ["M /workspace/notes"]
    assert claude.changes(steps[5]["id"]) == [
        "A /workspace/empty/",
        "A /workspace/link@",
        "D /workspace/src/",
        "D /workspace/src/main.py",
        "D /workspace/src/two",
    ]
    assert claude.changes(steps[6]["id"]) == ["A /workspace/half"]
    assert claude.changes(steps[7]["id"]) == []
    assert [step["tool"]["status"] for step in steps[5:]] == ["done", "failed", "done"]
    assert [entry["name"] for entry in claude.snap.json("journal", claude.trajectory)] == ["Bash"] * 4
    said = claude.snap.json("show", "--conversation", claude.trajectory)
    assert [one["role"] for one in said] == ["user", *["assistant", "user"] * 4], "each message once"
    ids = [block.get("id") or block["tool_use_id"] for one in said[1:] for block in one["content"]]
    assert ids == [f"toolu_s-1_{number}" for number in (1, 2, 3, 4) for _ in range(2)]


def test_a_rewind_brings_back_what_the_agent_touched_and_nothing_else(claude: Claude) -> None:
    claude.hook("SessionStart", source="startup")
    claude.says("do it")
    claude.call("echo 2 > src/two; rm notes; echo log > x.log")
    before = claude.files()
    claude.call("rm -r src; echo more > more; echo kept > keep.log; mkdir -p build; echo o > build/o")
    (claude.folder / "by-hand").write_text("a person's\n")
    target = claude.steps()[3]["id"]
    preview = claude.snap.json("rewind", "--preview", "--files", claude.trajectory, target)
    assert sorted(change["path"] for change in preview["changes"]) == [
        "/workspace/keep.log",
        "/workspace/more",
        "/workspace/src",
        "/workspace/src/main.py",
        "/workspace/src/two",
    ]
    changed = claude.files()
    claude.snap("rewind", "--files", claude.trajectory, target)
    outside = {"by-hand": "a person's\n", "build/o": "o\n"}
    assert claude.files() == before | outside
    claude.snap("undo", claude.trajectory)
    assert claude.files() == changed
    claude.snap("undo", claude.trajectory)
    assert claude.files() == before | outside


@pytest.mark.long  # bad input: test_bad_input_is_told_and_changes_nothing
def test_a_rewind_with_an_option_that_is_none_changes_nothing(claude: Claude) -> None:
    claude.hook("SessionStart")
    claude.call("echo 1 > one")
    target = claude.steps()[-1]["id"]
    claude.call("echo 2 > two")
    for words in (
        "--dry-run=yes", "--dry-runs", "--dry", "-n", "--session", "--session=", "--files --conversation", "--session=a --session=b"
    ):  # fmt: skip
        assert "is no request" in claude.send("rewind", f"{words} {target}", code=2), words
    assert "is no request" in claude.send("checkpoint", "--force now", code=2)
    assert "two" in claude.files()
    assert "deleted workspace/two" in claude.send("rewind", "--dry-run", "--files", "--session=all", target)
    assert "two" in claude.files()
    assert "1 path put back" in claude.send("rewind", "--files", "--files", target)
    assert "two" not in claude.files()


def test_a_rewound_conversation_is_a_new_session_with_the_history_up_to_there(claude: Claude) -> None:
    claude.says("first")
    claude.call("echo 1 > one")
    claude.write("assistant", [{"type": "text", "text": "done"}])
    claude.says("second")
    claude.call("echo 2 > two")
    claude.call("echo 3 > three")
    old = claude.transcript.read_bytes()
    steps = claude.steps()
    assert [step["tool"]["name"] for step in steps] == ["start", "prompt", "Bash", "prompt", "Bash", "Bash"]

    def rewound(number: int) -> list[str]:
        """The roles in the session that a rewind to a snapshot makes."""
        done = claude.snap.json("rewind", "--conversation", claude.trajectory, steps[number]["id"])
        program, option, session = done["tool"]["arguments"]["resume"].split()
        assert (program, option) == ("claude", "--resume")
        lines = [json.loads(line) for line in (claude.transcript.parent / f"{session}.jsonl").read_text().splitlines()]
        assert {line["sessionId"] for line in lines} == {session}
        assert [line["parentUuid"] for line in lines] == [None, *[line["uuid"] for line in lines[:-1]]]
        return [line["type"] for line in lines]

    assert rewound(4) == ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert claude.files()["three"] == "3\n", "the files stay"
    assert claude.transcript.read_bytes() == old, "the old session stays"
    told = claude.snap("rewind", "--conversation", claude.trajectory, steps[2]["id"])
    assert told.stdout.startswith("claude --resume "), "the line that goes on"
    assert rewound(3) == ["user", "assistant", "user", "assistant"], "up to before the words"
    assert rewound(2) == ["user", "assistant", "user"]
    messages = claude.snap.json("show", "--conversation", claude.trajectory)
    assert [one["role"] for one in messages] == ["user", "assistant", "user"]
    undone = claude.snap.json("undo", claude.trajectory)
    assert "resume" in undone["tool"]["arguments"]
    assert len(claude.snap.json("show", "--conversation", claude.trajectory)) == 4
    nothing = claude.snap.json("rewind", claude.trajectory, steps[1]["id"])
    assert "resume" not in nothing["tool"]["arguments"], "there was nothing before the first words"
    assert sorted(claude.files()) == [".gitignore", "notes", "src/main.py"]


def test_calls_without_results_are_no_part_of_a_cut_history(claude: Claude) -> None:
    """Two calls at once: a history that ends with the first must not hold the second, which has no result."""
    claude.says("both")
    both = [{"type": "tool_use", "id": f"toolu_{name}", "name": "Bash", "input": {}} for name in "ab"]
    for block in both:
        claude.write("assistant", [block])
    for name in "ab":
        asked = {"tool_name": "Bash", "tool_input": {}, "tool_use_id": f"toolu_{name}"}
        claude.hook("PreToolUse", **asked)
        (claude.folder / name).write_text(name)
        claude.hook("PostToolUse", **asked, tool_response={})
        claude.write("user", [{"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": ""}])
    first = claude.steps()[2]["id"]
    session = claude.snap.json("rewind", claude.trajectory, first)["tool"]["arguments"]["resume"].split()[-1]
    text = (claude.transcript.parent / f"{session}.jsonl").read_text()
    assert "toolu_a" in text
    assert "toolu_b" not in text
    assert sorted(claude.files()) == [".gitignore", "a", "notes", "src/main.py"]


@pytest.mark.long  # their files: test_folder_rewind.py
def test_two_sessions_in_one_folder_keep_their_conversations_apart(claude: Claude) -> None:
    other = Claude(claude.snap, claude.folder, "s-2")
    claude.says("one")
    other.says("two")
    claude.call("echo 1 > one")
    other.call("echo 2 > two")
    last, before = claude.steps()[-1]["id"], claude.steps()[-2]["id"]

    def said(snapshot: str) -> str:
        return json.dumps(claude.snap.json("show", "--conversation", snapshot))

    assert "toolu_s-1_1" in said(before)
    assert "two" not in said(before)
    assert "toolu_s-2_1" in said(last)
    assert "toolu_s-1_1" not in said(last)


@pytest.mark.long  # one after the other: the second test
def test_calls_side_by_side_lose_nothing_to_outside(claude: Claude) -> None:
    """A call that begins while another runs: its changes so far are an agent's, so a rewind takes them back."""
    claude.hook("SessionStart")
    ids = ("toolu_x", "toolu_y")
    asked = [{"tool_name": "Bash", "tool_input": {}, "tool_use_id": one} for one in ids]
    claude.hook("PreToolUse", **asked[0])
    (claude.folder / "x").write_text("x")
    claude.hook("PreToolUse", **asked[1], agent_id="sub")
    (claude.folder / "y").write_text("y")
    claude.hook("PostToolUse", **asked[1], tool_response={}, agent_id="sub")
    claude.hook("PostToolUse", **asked[0], tool_response={})
    assert claude.names() == ["start", "edits", "Bash", "Bash"]
    claude.snap("rewind", "--files", claude.trajectory, claude.steps()[1]["id"])
    assert sorted(claude.files()) == [".gitignore", "notes", "src/main.py"]


def test_an_interrupted_call_has_a_snapshot(claude: Claude) -> None:
    claude.says("begin")
    claude.hook("PreToolUse", tool_name="Bash", tool_input={}, tool_use_id="toolu_cut")
    (claude.folder / "half").write_text("half")
    claude.says("no, stop")
    steps = claude.steps()
    assert [(step["tool"]["name"], step["tool"]["status"]) for step in steps[2:]] == [
        ("Bash", "interrupted"),
        ("prompt", "done"),
    ]
    claude.snap("rewind", "--files", claude.trajectory, steps[1]["id"])
    assert "half" not in claude.files()


def test_nothing_is_lost_when_the_daemon_goes_and_comes(claude: Claude) -> None:
    """A hook never stands in the way; what changed meanwhile is in the next snapshot, and nothing else."""
    claude.hook("SessionStart")
    claude.call("echo 1 > one")
    claude.snap.stop_daemon()
    event = {"hook_event_name": "PreToolUse", "session_id": "s-1", "tool_name": "Bash", "tool_use_id": "t"}
    assert "no snapshot" in claude.send("hook", "claude", data=json.dumps(event))
    (claude.folder / "meanwhile").write_text("x")
    claude.snap("ls")
    claude.says("go on")
    assert claude.changes(claude.steps()[-1]["id"]) == ["A /workspace/meanwhile"]
    claude.call("rm one")
    assert claude.changes(claude.steps()[-1]["id"]) == ["D /workspace/one"]
    claude.snap("rewind", "--files", claude.trajectory, claude.steps()[2]["id"])
    assert claude.files()["one"] == "1\n"


@pytest.mark.long  # with a person who writes meanwhile: test_folder_rewind.py
@pytest.mark.parametrize(
    "name",
    [
        "engine.folders.captured",
        # In the short set too, with a person who writes meanwhile: test_folder_rewind.py.
        *(pytest.param(f"engine.folders.{name}", marks=pytest.mark.long) for name in ("put", "put_back")),
    ],
)
def test_a_rewind_that_was_cut_off_is_done_again(claude: Claude, name: str) -> None:
    claude.hook("SessionStart")
    claude.call("echo 1 > one; echo 2 > two")
    before = claude.files()
    claude.call("rm one; echo 3 > two; mkdir d; echo 4 > d/four")
    after = claude.files()
    target, trajectory = claude.steps()[2]["id"], claude.trajectory
    claude.snap.stop_daemon()
    dies = Snap(claude.snap.state_dir, {**claude.snap.env, "SNAPSHOTD_FAILPOINT": name})
    dies("rewind", "--files", trajectory, target, code=None)
    wait_until(
        lambda: f"failpoint {name} reached" in (claude.snap.state_dir / "daemon.log").read_text(), "the daemon died"
    )
    claude.snap("rewind", "--files", claude.trajectory, target)
    assert claude.files() == before
    shown = [step for step in claude.steps() if step["tool"]["name"] == "Bash"]
    assert len(shown) == 2
    claude.snap("rewind", "--files", claude.trajectory, shown[-1]["id"])
    assert claude.files() == after


@pytest.mark.long  # daemons that come and go: two tests above
def test_a_trajectory_that_was_cut_off_at_its_beginning(claude: Claude) -> None:
    claude.snap.stop_daemon()
    dies = Snap(claude.snap.state_dir, {**claude.snap.env, "SNAPSHOTD_FAILPOINT": "engine.folders.begun"})
    dies("ls")
    claude.hook("SessionStart")
    claude.snap("ls")
    claude.hook("SessionStart")
    lines = [line for line in claude.snap.json("ls") if line["head"]]
    heads = [claude.snap.json("log", "--all", line["id"])[-1] for line in lines]
    (*_, head) = [head["id"] for head in heads if head["tool"]["name"] == "edits"]
    wait_until(lambda: claude.snap.json("show", head)["files"] is not None, "it is counted")
    assert claude.snap.json("show", head)["files"]["added"] == 3


# -- a user who is not root ----------------------------------------------------------------------------------------------


@pytest.fixture
def user(empty_snap: Snap) -> Iterator[Claude]:
    """Claude Code of a user without rights, in a folder of that user."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "theirs"
        folder.mkdir()
        (folder / "own").write_text("own\n")
        for path in (folder, folder / "own", Path(place)):
            os.chown(path, NOBODY, NOBODY)
        found = Claude(empty_snap, folder)
        found.run_as = NOBODY
        shutil.copy(SEND, place)
        found.program = ["/usr/bin/python3", "-I", "-S", f"{place}/send.py"]
        yield found
    for line in empty_snap.json("ls"):
        empty_snap("rm", "--force", line["id"])


def _as_user(claude: Claude, command: str) -> None:
    subprocess.run(["bash", "-c", command], cwd=claude.folder, user=NOBODY, group=NOBODY, extra_groups=[], check=True)


def test_a_user_gets_no_file_that_only_root_may_read(user: Claude) -> None:
    user.hook("SessionStart")
    secret = user.folder.parent / "secret"
    secret.write_text("root's\n")
    secret.chmod(0o600)
    os.link(secret, user.folder / "linked")
    (user.folder / "closed").mkdir(mode=0o700)
    (user.folder / "closed" / "in").write_text("root's\n")
    _as_user(user, f"ln -s {secret} to-secret; ln -s {secret.parent} out")
    user.hook("UserPromptSubmit", prompt="x")
    head = user.steps()[-1]["id"]
    assert user.changes(head) == ["A /workspace/out@", "A /workspace/to-secret@"]
    assert "linked cannot be read" in json.dumps(user.snap.json("show", head))


def test_a_rewind_acts_as_the_user_and_stays_in_the_folder(user: Claude) -> None:
    user.hook("SessionStart")
    _as_user(user, "mkdir d; echo 1 > d/x; chmod 640 d/x")
    user.hook("UserPromptSubmit", prompt="x")
    target = user.steps()[-1]["id"]
    asked = {"tool_name": "Bash", "tool_input": {}, "tool_use_id": "t"}
    user.hook("PreToolUse", **asked)
    outside = user.folder.parent / "outside"
    outside.mkdir()
    _as_user(user, f"rm -r d own; ln -s {outside} d")
    user.hook("PostToolUse", **asked, tool_response={})
    user.snap("rewind", "--files", user.trajectory, target)
    assert list(outside.iterdir()) == []
    assert user.files() == {"d/x": "1\n", "own": "own\n"}
    found = (user.folder / "d" / "x").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (NOBODY, NOBODY, 0o640)

    user.hook("PreToolUse", **asked)
    _as_user(user, "rm d/x; rmdir d")
    user.hook("PostToolUse", **asked, tool_response={})
    (user.folder / "d").symlink_to("/etc")  # a person's, after the agent's call
    told = user.snap("rewind", "--files", user.trajectory, target).stderr
    assert not Path("/etc/x").exists()
    assert user.files() == {"own": "own\n"}
    assert "d/x stays as it is" in told
    assert os.readlink(user.folder / "d") == "/etc"


def test_a_user_reaches_only_the_own_trajectory(user: Claude, claude: Claude) -> None:
    claude.hook("SessionStart")
    user.hook("SessionStart")
    theirs = claude.steps()[-1]["id"]
    assert "of this folder" in user.send("rewind", theirs, code=4)
    assert "no request" in user.send("cat", theirs, code=2)
    user.folder = claude.folder
    claude.folder.chmod(0o755)
    for parent in claude.folder.parents:
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    assert "no snapshot was taken" in user.send("log", code=4)


# -- what is left out ----------------------------------------------------------------------------------------------------


def test_ignored_files_are_left_out_and_left_alone(claude: Claude) -> None:
    (claude.folder / "node_modules").mkdir()
    (claude.folder / "node_modules" / "m.js").write_text("m")
    (claude.folder / ".git").mkdir()
    (claude.folder / ".git" / "config").write_text("g")
    (claude.folder / "src" / ".gitignore").write_text("*.tmp\n!main.py\n")
    (claude.folder / ".snapshotdignore").write_text("data/\n!node_modules/\n")
    claude.hook("SessionStart")
    claude.call("mkdir data; echo > data/big; echo > src/a.tmp; echo > a.tmp; echo > x.log; echo > node_modules/n.js")
    assert claude.changes(claude.steps()[-1]["id"]) == ["A /workspace/a.tmp", "A /workspace/node_modules/n.js"]
    claude.call("echo '*.tmp' >> .gitignore; rm -r .git; echo > b.tmp")
    assert claude.changes(claude.steps()[-1]["id"]) == ["M /workspace/.gitignore"], "b.tmp is ignored"
    claude.call("echo more > a.tmp")
    assert claude.changes(claude.steps()[-1]["id"]) == ["M /workspace/a.tmp"], "it is tracked, as with git"
    claude.snap("rewind", "--files", claude.trajectory, claude.steps()[1]["id"])
    assert "a.tmp" not in claude.files()
    assert claude.files()["b.tmp"] == "\n"
    assert claude.files()["data/big"] == "\n"


def test_a_change_that_only_the_content_shows(claude: Claude) -> None:
    """The same size within a tick of the kernel's clock, and times that a program sets back."""
    claude.hook("SessionStart")
    for number in range(5):
        claude.hook("PreToolUse", tool_name="Bash", tool_input={}, tool_use_id=f"t{number}")
        (claude.folder / "notes").write_text(f"min{number}\n")
        os.utime(claude.folder / "notes", ns=(10**18, 10**18))
        claude.hook("PostToolUse", tool_name="Bash", tool_input={}, tool_use_id=f"t{number}", tool_response={})
    shown = [step for step in claude.steps() if step["tool"]["name"] == "Bash"]
    assert [claude.snap("cat", f"{step['id']}:/workspace/notes").stdout for step in shown] == [
        f"min{number}\n" for number in range(5)
    ]


def test_a_folder_that_holds_more_than_a_project_is_refused(empty_snap: Snap) -> None:
    there = Claude(empty_snap, Path("/etc"))
    assert "more than a project" in there.send("hook", "claude", data='{"hook_event_name": "SessionStart"}')


@pytest.mark.parametrize("data", ["", "no json", "[1]", '{"hook_event_name": 3}', "{" * 5000, '{"a": '])
def test_bad_input_is_told_and_changes_nothing(claude: Claude, data: str) -> None:
    claude.send("hook", "claude", data=data)
    assert all(line["name"] != "project" or line["runtime"] == "folder" for line in claude.snap.json("ls"))


def test_other_agents_send_their_own_events(claude: Claude) -> None:
    claude.agent = "gemini"
    claude.hook("SessionStart")
    claude.hook("BeforeTool", tool_name="run_shell_command", tool_input={"command": "x"})
    (claude.folder / "made").write_text("x")
    response = {"llmContent": "x", "returnDisplay": "x", "error": "it went wrong"}
    claude.hook("AfterTool", tool_name="run_shell_command", tool_input={"command": "x"}, tool_response=response)
    step = claude.steps()[-1]
    assert (step["tool"]["name"], step["tool"]["status"]) == ("run_shell_command", "failed")
    assert claude.changes(step["id"]) == ["A /workspace/made"]
    assert "cannot be cut" in claude.snap("rewind", claude.trajectory, step["id"], code=2).stderr
    claude.snap("rewind", "--files", claude.trajectory, claude.steps()[1]["id"])
    assert "made" not in claude.files()


def test_snapshots_of_a_folder_keep_a_day_and_what_is_named(claude: Claude) -> None:
    claude.hook("SessionStart")
    assert claude.snap.json("policy", claude.trajectory)["policy"]["keep_within_s"] == 86400
    assert claude.send("checkpoint", "so", "far").endswith(" is so-far\n")
    assert claude.steps()[-1]["tags"] == ["so-far"]


@pytest.mark.long  # what is kept: the test before, and unit/engine/test_retention.py
def test_old_snapshots_of_a_folder_go_by_themselves(tmp_path: Path) -> None:
    """A daemon that keeps the newest two, for a moment. Named ones, the first and the calls stay."""
    settings = {"KEEP_LAST": "2", "KEEP_S": "0.001", "PRUNE_S": "0.2"}
    snap = Snap(tmp_path / "state", {f"SNAPSHOTD_FOLDER_{name}": value for name, value in settings.items()})
    snap("ls")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes").write_text("mine\n")
    claude = Claude(snap, folder)
    claude.hook("SessionStart")
    for number in range(5):
        claude.call(f"echo {number} > file")
        if number == 1:
            claude.send("checkpoint", "kept")
    steps = claude.steps()
    kept = {0, len(steps) - 1, len(steps) - 2} | {at for at, step in enumerate(steps) if step["tags"]}
    wanted = ["stored" if at in kept else "pruned" for at in range(len(steps))]
    wait_until(lambda: [step["state"] for step in claude.steps()] == wanted, "the others are pruned")
    assert wanted.count("pruned") == len(steps) - 4
    assert len([step for step in steps if step["tool"]["name"] == "Bash"]) == 5
    claude.snap("rewind", "--files", claude.trajectory, "kept")
    assert (folder / "file").read_text() == "1\n"
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


@pytest.mark.long  # the long set alone has it
def test_no_sandbox_runs_in_a_folder(claude: Claude) -> None:
    claude.hook("SessionStart")
    assert "fork a snapshot" in claude.snap("exec", claude.trajectory, "--", "ls", code=None).stderr
