"""Every command against the real API: what it prints, in which shape, on which stream, with which exit code."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from snapshotd.cli.command import after_dashes
from snapshotd.cli.commands.running.exec import command as exec_
from snapshotd.cli.commands.running.run import _parse_program
from snapshotd.cli.commands.running.run import command as run
from snapshotd.types import short
from tests.unit.cli.conftest import Cli, Ran
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon

RUN = ("run", "--isolation", "none")


def test_create_prints_the_id(cli: Cli) -> None:
    made = cli("create", "--json")
    assert sorted(made.json) == ["snapshot", "trajectory"]
    assert cli("create").out.strip() in cli("ls", "--no-trunc", "-q").out.split()


def test_exec_json_has_the_shape_of_the_contract(cli: Cli, box: str) -> None:
    done = cli("exec", "--json", box, "--", "fail", "7", "oops")
    assert done.code == 7
    assert list(done.json) == ["exit_code", "timed_out", "stdout", "stderr", "snapshot"]
    told = {"exit_code": 7, "timed_out": False, "stdout": "", "stderr": "oops\n"}
    assert done.json == {**told, "snapshot": done.json["snapshot"]}
    assert done.json["snapshot"] in cli("log", "-q", "--no-trunc", box).out.split()


def test_exec_streams_bytes_and_tells_of_the_snapshot_on_stderr(cli: Cli, box: str) -> None:
    done = cli("exec", box, "--", "raw", "ff000a")
    assert done.out.encode(errors="surrogateescape") == b"\xff\x00\n"
    head = cli("log", "-q", box).out.split()[-1]
    assert re.fullmatch(rf"● 1 {head}  exec  done  \+0 ~0 -0  0 B  \d+\.\d ms\n", done.err)
    assert cli("exec", "-q", box, "--", "echo").err == ""


def test_exec_json_keeps_what_is_not_text(cli: Cli, box: str) -> None:
    answer = cli("exec", "--json", box, "--", "raw", "ff00").json
    assert base64.b64decode(answer["stdout_b64"]) == b"\xff\x00"


def test_exec_in_a_throw_away_fork(cli: Cli, box: str) -> None:
    assert cli("exec", "--snapshot", box, "--json", "--", "ls", "-la").json["snapshot"] is None
    assert len(cli("log", "-q", box).out.split()) == 1


@pytest.mark.parametrize("options", [[], ["-q"], ["-qe", "A=1"], ["--timeout=60"]])
def test_exec_passes_the_command_as_it_is(cli: Cli, box: str, options: list[str]) -> None:
    """Our options stand before the sandbox or right behind it; from the command's first word on, all is the
    command's."""
    for argv in (["echo", "-n", "--json"], ["echo", "a", "--", "b"], ["ls", "-la"], ["true", "-e", "--snapshot", "x"]):
        for dashes in ([], ["--"]):
            for words in ([*options, box, *dashes], [box, *options, *dashes], [f"--snapshot={box}", *options, *dashes]):
                done = cli("exec", *words, *argv)
                assert done.code == 0, done.err
                if box in words:
                    assert cli("show", "--json", box).json["tool"]["arguments"]["argv"] == argv


def test_exec_options_reach_the_command(cli: Cli, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "yes")
    words = ("-e", "A=b=c", "--env", "FROM_HERE", "-w", "/tmp")
    assert cli("exec", *words, box, "--", "sh", "-c", "echo $A $FROM_HERE; ls ../workspace").out == (
        "b=c yes\na.txt\nlink\n"
    )
    arguments = cli("show", "--json", box).json["tool"]["arguments"]
    assert arguments["cwd"] == "/tmp"
    assert "another user needs a sandbox with isolation" in cli("exec", "-u", "1:2", box, "ls").err


@pytest.mark.parametrize(("typed", "seconds"), [("90", 90), ("1.5", 1.5), ("10m", 600), ("2s", 2)])
def test_exec_takes_a_timeout_in_seconds_or_with_a_unit(typed: str, seconds: float) -> None:
    assert exec_.make_context("exec", ["--timeout", typed, "box", "ls"]).params["timeout"] == seconds


def test_a_timeout_ends_the_command(cli: Cli, box: str) -> None:
    done = cli("exec", "--timeout", "0.1", "--json", box, "forever").json
    assert (done["exit_code"], done["timed_out"]) == (124, True)


@pytest.mark.parametrize("typed", ["0", "-1", "soon", "nan", "99999d"])
def test_a_timeout_that_is_none_is_refused(cli: Cli, box: str, typed: str) -> None:
    done = cli("exec", "--timeout", typed, box, "ls")
    assert (done.code, done.err.count("\n")) == (125, 1)
    assert typed in done.err


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """Says hello, makes a call, and ends with 3."""
    path = tmp_path / "agent.py"
    path.write_text(
        "import subprocess, sys\n"
        "print('hello', flush=True)\n"
        "subprocess.run(['snapshotd-agent', 'run', 'run_tests', '--', 'true'], check=True)\n"
        "sys.exit(3)\n"
    )
    return str(path)


def test_run_shows_output_and_one_line_per_snapshot(cli: Cli, agent: str) -> None:
    done = cli(*RUN, agent, "x")
    assert (done.code, done.out) == (3, "hello\n")
    started, *snapshots, ended = done.err.splitlines()
    assert started.startswith("▶ trajectory ")
    assert [line.split()[:2] + line.split()[3:5] for line in snapshots] == [
        ["●", "0", "start", "done"],
        ["●", "1", "run_tests", "done"],
        ["●", "2", "exit", "failed"],
    ]
    assert re.search(r"  run_tests  done  \+0 ~0 -0  0 B  \d+\.\d ms  true$", snapshots[1])
    assert ended.startswith("■ exit code 3, 3 snapshots; `snapshotd log ")


def test_run_json_is_one_event_per_line_ending_with_finished(cli: Cli, agent: str) -> None:
    done = cli(*RUN, "--json", agent)
    events = [json.loads(line) for line in done.out.splitlines()]
    told = [event["event"] for event in events]
    assert (told[0], told[-1], set(told[1:-1])) == ("started", "finished", {"output", "snapshot"})
    assert events[-1]["exit_code"] == 3
    assert events[-1]["snapshot_count"] == 3
    assert events[-1]["trajectory"] == events[0]["trajectory"]
    assert done.err == ""


@pytest.mark.parametrize(
    ("words", "argv", "network"),
    [
        (["agent.py", "--json", "-x"], ["agent.py", "--json", "-x"], None),
        (["agent.py", "a", "--", "b"], ["agent.py", "a", "--", "b"], None),
        (["--", "ls", "-la"], ["ls", "-la"], None),
        (["--network", "agent.py"], ["agent.py"], "bridge"),
        (["--network", "--", "ls"], ["ls"], "bridge"),
        (["--network", "bridge", "agent.py", "--network", "x"], ["agent.py", "--network", "x"], "bridge"),
    ],
)
def test_run_knows_its_own_words_from_the_agents(words: list[str], argv: list[str], network: str | None) -> None:
    context = run.make_context("run", words)
    told = _parse_program(context.params["program"], after_dashes(context))
    assert [*filter(None, [told["agent"]]), *(told["args"] or told["command"] or [])] == argv
    assert context.params["network"] == network


def test_what_run_starts_is_recorded(cli: Cli, agent: str) -> None:
    for words, argv in (
        ([agent, "--json", "-x"], ["python3", "../agent/agent.py", "--json", "-x"]),
        (["--", "ls", "-la"], ["ls", "-la"]),
    ):
        started = cli(*RUN, "-d", *words)
        assert started.code == 0, started.err
        trajectory = next(item for item in cli("ls", "--json").json if item["id"] == started.out.strip())
        assert trajectory["agent"]["argv"] == argv
    assert "the network bridge needs a sandbox with isolation" in cli(*RUN, "--network", agent).err


def test_a_detached_run_can_be_attached_to(cli: Cli, agent: str) -> None:
    trajectory = cli(*RUN, "--detach", "--json", agent).json["trajectory"]
    done = cli("attach", short(trajectory))
    assert (done.code, done.out) == (3, "hello\n")


def test_attaching_to_a_sandbox_without_an_agent_is_told_apart(cli: Cli, box: str) -> None:
    done = cli("attach", box)
    assert done.code == 125
    assert "no agent ever ran" in done.err


def test_limits_reach_the_sandbox(cli: Cli) -> None:
    """Those of a sandbox with isolation: `e2e/test_exec.py`."""
    for words in (["--memory", "512m"], ["--cpus", "0.5"], ["--pids", "64"], ["--disk", "1g"]):
        done = cli("create", "--isolation", "none", *words)
        assert (done.code, "a sandbox with isolation" in done.err) == (125, True), done.err


def test_log_json_has_the_shape_of_the_contract(cli: Cli, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", "echo new > new; echo more >> a.txt")
    eventually(lambda: cli("log", "--json", box).json[1]["files"] is not None)
    first, second = cli("log", "--json", box).json
    assert list(second) == [
        "id",
        "parent",
        "trajectory",
        "seq",
        "tool",
        "files",
        "state",
        "pause_ms",
        "created_at",
        "tags",
        "warnings",
        "refused",
        "reused",
        "kind",
        "published",
    ]
    assert list(second["tool"]) == ["name", "arguments", "status", "exit_code", "duration_ms"]
    assert second["files"] == {"added": 1, "changed": 1, "deleted": 0, "bytes": 15}
    assert (second["parent"], second["seq"]) == (first["id"], 1)
    assert second["state"] in ("captured", "stored")


def test_log_as_a_table(cli: Cli, box: str) -> None:
    cli("exec", box, "--", "fail", "2", "x")
    header, first, second = cli("log", box).out.splitlines()
    assert header.split() == [
        "SEQ",
        "SNAPSHOT",
        "TOOL",
        "STATUS",
        "EXIT",
        "FILES",
        "BYTES",
        "PAUSE",
        "STATE",
        "TAGS",
        "ARGUMENT",
    ]
    assert first.split()[2:4] == ["start", "done"]
    assert second.split()[2:9] == ["exec", "failed", "2", "+0", "~0", "-0", "0"]
    assert second.split()[-4:] == ["-", "fail", "2", "x"]


def test_ls_and_ps(cli: Cli, box: str) -> None:
    row = next(line for line in cli("ls").out.splitlines() if box in line)
    assert row.split()[1:3] == [box, "running"]
    assert row.split()[0] in cli("ps", "-q").out.split()
    assert box in cli("ps").out
    assert cli("stop", box).out == f"{box}\n"
    assert box not in cli("ps").out
    assert cli("stop", "--json", box).json[0]["status"] == "stopped"


def test_rm_refuses_what_runs_unless_forced(cli: Cli, box: str) -> None:
    refused = cli("rm", box)
    assert (refused.code, refused.out) == (6, "")
    assert "--force" in refused.err
    identity = next(item["id"] for item in cli("ls", "--json").json if item["name"] == box)
    assert cli("rm", "--force", "--json", box).json == {"removed": [identity]}
    assert cli("log", box).code == 4


def test_fork_prints_ids_and_its_json_has_the_shape_of_the_contract(cli: Cli, box: str, agent: str) -> None:
    ran = cli(*RUN, "--detach", agent).out.strip()
    assert cli("wait", ran).code == 3
    answer = cli("fork", ran, "--n", "3", "--json", "--", "--prompt", "{index}").json
    assert list(answer) == ["experiment", "trajectories"]
    assert len(answer["trajectories"]) == 3
    forks = {item["id"]: item for item in cli("ls", "--json").json if item["id"] in answer["trajectories"]}
    assert {item["experiment"] for item in forks.values()} == {answer["experiment"]}
    assert [forks[one]["agent"]["argv"][-2:] for one in answer["trajectories"]] == [
        ["--prompt", str(number)] for number in range(3)
    ]
    assert len(cli("fork", box).out.split()) == 1


@pytest.mark.parametrize(
    ("count", "said"),
    [
        ("0", "from 1"),
        ("-1", "from 1"),
        ("two", "from 1"),
        ("10001", "from 1 to 256, or with --parallel to 10,000"),
        ("257", "256"),
        ("10000", "--parallel"),
    ],
)
def test_fork_counts_are_checked_before_anything_starts(cli: Cli, box: str, count: str, said: str) -> None:
    before = len(cli("ls", "-q").out.split())
    refused = cli("fork", box, "--n", count)
    assert refused.code == 2
    assert said in refused.err
    assert len(cli("ls", "-q").out.split()) == before


def test_tree_hangs_forks_below_their_snapshot(cli: Cli, box: str) -> None:
    fork = cli("fork", box).out.strip()
    lines = cli("tree").out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(box))
    assert " 0 " in lines[at + 1]
    assert short(fork) in lines[at + 2]
    assert lines[at + 2].startswith("    ")
    tree = cli("tree", "--json").json
    parent = next(item for item in tree if item["name"] == box)
    child = next(item for item in tree if item["id"] == fork)
    assert child["forked_from"] == parent["snapshots"][0]["id"]


def test_show(cli: Cli, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", "snapshotd-agent message user 'fix it'")
    cli("exec", box, "--", "snapshotd-agent", "message", "--json", "assistant", '{"text": "done\\u001b[31m"}')
    cli("exec", box, "--", "sh", "-c", "echo first second; exit 2")
    text = cli("show", box).out
    for expected in ('{"argv": ["sh", "-c", "echo', "failed, exit code 2, ", "2 messages", "+0 ~0 -0  0 B"):
        assert expected in text
    details = cli("show", "--json", box).json
    assert details["method"] == "unchanged"
    assert details["tool"]["outputs"] == ["stdout"]
    assert cli("show", "--output", "stdout", box).out == "first second\n"
    assert cli("show", "--conversation", box).out == 'user:\n  fix it\nassistant:\n  {"text": "done\\u001b[31m"}\n'
    assert [message["role"] for message in cli("show", "--conversation", "--json", box).json] == ["user", "assistant"]


@pytest.fixture
def changed(cli: Cli, box: str) -> str:
    """A sandbox whose last call changed names and contents that are no text."""
    cli("exec", box, "--", "sh", "-c", "mkdir gone; echo 1 > $(printf 'a\\033.txt')")
    cli(
        *("exec", box, "--", "sh", "-c"),
        r"rmdir gone; echo 2 > $(printf 'a\033.txt'); touch $(printf 'new\377.txt'); printf 'caf\351\n' > a.txt; touch ../tmp/x",
    )
    return box


def test_diff_never_prints_control_characters(cli: Cli, changed: str) -> None:
    assert cli("diff", changed).out == (
        "A /tmp/x\nM /workspace/a\\x1b.txt\nM /workspace/a.txt\nD /workspace/gone/\nA /workspace/new\\xff.txt\n"
    )
    assert "\x1b" not in cli("diff", "--stat", changed).out
    assert cli("diff", "--stat", changed).out.splitlines()[-1] == " 2 added, 2 changed, 1 deleted"
    changes = cli("diff", "--json", changed).json
    assert [change["change"] for change in changes] == ["added", "changed", "changed", "deleted", "added"]
    assert base64.b64decode(changes[-1]["path_b64"]) == b"/workspace/new\xff.txt"
    assert changes[1]["path"] == "/workspace/a\x1b.txt"


def test_a_patch_is_raw_and_what_it_lacks_is_told(cli: Cli, changed: str) -> None:
    done = cli("diff", "--patch", changed)
    assert b"\n-hello\n+caf\xe9\n" in done.out.encode(errors="surrogateescape")
    assert "the patch lacks 1 change outside /workspace" in done.err
    assert cli("diff", "--patch", "--stat", changed).code == 2


def test_cat(cli: Cli, box: str) -> None:
    assert cli("cat", f"{box}:/workspace/a.txt").out == cli("cat", f"{box}:a.txt").out == "hello\n"
    answer = cli("cat", "--json", f"{box}:a.txt").json
    assert (answer["path"], base64.b64decode(answer["content_b64"])) == ("/workspace/a.txt", b"hello\n")
    assert cli("cat", f"{box}:/nothing").code == 4
    assert cli("cat", f"{box}:/workspace").code == 2
    assert "write ID:/PATH" in cli("cat", box).err


def test_restore(cli: Cli, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("restore", box, "--to", "out")
    assert done.code == 0
    assert done.err == "2 files and 3 directories, 6 B, in out\n"
    assert (tmp_path / "out/workspace/a.txt").exists(), "a relative target means the client's folder"
    assert cli("restore", box, "--to", "out").code == 2
    assert cli("restore", box, "--to", "out2", "--path", "/workspace", "--json").json["file_count"] == 2


def test_tag(cli: Cli, box: str) -> None:
    head = cli("log", "-q", "--no-trunc", box).out.strip()
    name = f"{box}-tag"
    assert cli("tag", box, name, "--json").json == {"snapshot": head, "name": name}
    assert cli("show", "--json", name).json["tags"] == [name]
    cli("exec", box, "--", "ls")
    assert cli("tag", box, name).code == 6
    assert cli("tag", "--move", box, name).code == 0
    assert cli("tag", "--delete", name, "--json").json == {"removed": [name]}
    assert cli("tag", "--delete", name).code == 4
    assert cli("tag", box).code == 2
    assert cli("tag", box, "../x").code == 2


def test_rewind(cli: Cli, box: str) -> None:
    first = cli("log", "-q", box).out.strip()
    cli("exec", box, "--", "ls")
    assert cli("rewind", box, first, "--json").json["tool"]["name"] == "rewind"
    assert "● 3 " in cli("rewind", box, first).err


def test_images(cli: Cli) -> None:
    built = cli("image", "build", "minimal", "--name", "tiny", "--json")
    said = "snapshotd: making the image tiny of this machine's own programs\n"
    assert (built.json["name"], built.err) == ("tiny", said)
    assert "tiny" in cli("image", "ls").out
    assert cli("image", "rm", "tiny").out == "tiny\n"
    assert cli("image", "rm", "tiny").code == 4
    assert cli("image", "build", "nothing").code == 4


def test_version_and_daemon_status(cli: Cli) -> None:
    versions = cli("version", "--json").json
    assert versions["client_version"] == versions["daemon_version"]
    assert cli("daemon", "--status", "--json").json["mode"] == "folder"
    assert cli("daemon", "--status", "--stop").code == 2
    assert cli("--version").out.startswith("snapshotd ")


def test_doctor_names_every_piece(cli: Cli) -> None:
    checks = cli("doctor", "--json").json
    assert {"mode", "runc", "reflink", "cgroups"} <= {check["name"] for check in checks}
    assert all(check["fix"] for check in checks if check["ok"] is False)
    assert "runc" in cli("doctor").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli: Cli, shell: str) -> None:
    assert "_SNAPSHOTD_COMPLETE" in cli("completion", shell).out


def test_cp(cli: Cli, box: str, tmp_path: Path) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/sub/f").write_text("f")
    taken = cli("cp", "--json", str(tmp_path / "d/sub/f"), f"{box}:new").json
    assert taken["tool"]["arguments"] == {"path": "/workspace/new", "bytes": 1}
    for source, target, path in (
        ("d/sub/f", "/workspace", "/workspace/f"),
        ("d/sub/f", "a.txt", "/workspace/a.txt"),
        ("d", "", "/workspace/d/sub/f"),
        ("d/.", "", "/workspace/sub/f"),
        ("d", "/there", "/there/sub/f"),
    ):
        done = cli("cp", f"{tmp_path}/{source}", f"{box}:{target}")
        assert (done.code, done.out) == (0, ""), done.err
        assert cli("cat", f"{box}:{path}").out == "f", done.err
    for source, target, path in (
        ("new", "", "new"),
        ("new", "other", "other"),
        ("d", "", "d/sub/f"),
        ("d/.", "", "sub/f"),
        ("d", "fresh", "fresh/sub/f"),
        ("/there/", "fresh", "fresh/there/sub/f"),
    ):
        (tmp_path / "out").mkdir(exist_ok=True)
        assert cli("cp", f"{box}:{source}", str(tmp_path / "out" / target)).code == 0
        assert (tmp_path / "out" / path).read_text() == "f"
    assert cli("cp", "--json", f"{box}:new", str(tmp_path / "x")).json["bytes"] == 1
    assert "\0new\0" in cli("cp", f"{box}:new", "-").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("here", "there"), "one of SOURCE and TARGET"),
        (("{box}:a.txt", "{box}:b"), "one of SOURCE and TARGET"),
        (("./x:y", "/x:y"), "one of SOURCE and TARGET"),
        (("/nothing/here", "{box}:x"), "there is no /nothing/here"),
        (("/etc/passwd", "{box}:nothing/"), "there is no directory"),
        (("/etc", "{box}:a.txt"), "is no directory"),
        (("{box}:a.txt", "/nothing/here/"), "there is no directory"),
        (("{box}:a.txt", "/nothing/here"), "cannot be copied"),
        (("{box}:/workspace", "/etc/passwd"), "is no directory"),
        (("--user", "me", "{box}:a.txt", "x"), "go into a sandbox"),
        (("--json", "{box}:a.txt", "-"), "cannot both go"),
        (("{box}:nothing", "x"), "it does not exist"),
    ],
)
def test_cp_says_what_cannot_be(cli: Cli, box: str, words: tuple[str, ...], said: str) -> None:
    done = cli("cp", *(word.format(box=box) for word in words))
    assert done.code in (2, 4)
    assert said in done.err
    assert len(cli("log", "--json", box).json) == 1


def test_logs_print_what_a_run_printed(cli: Cli, agent: str, box: str) -> None:
    trajectory = cli(*RUN, "--detach", "--json", agent).json["trajectory"]
    for words in (["logs", "-f", trajectory], ["logs", trajectory]):
        assert cli(*words) == Ran(0, "hello\n", "")
    events = [json.loads(line)["event"] for line in cli("logs", "--json", trajectory).out.splitlines()]
    assert events[0] == "started"
    assert "output" in events
    assert (cli("logs", box).code, "no agent ever ran" in cli("logs", box).err) == (2, True)


def test_wait_ends_with_the_runs_code(cli: Cli, agent: str, box: str) -> None:
    trajectory = cli(*RUN, "--detach", "--json", agent).json["trajectory"]
    assert cli("wait", trajectory) == Ran(3, "", "")
    done = cli("wait", "--json", trajectory)
    assert (done.code, done.json) == (3, {"trajectory": trajectory, "exit_code": 3, "status": "failed"})
    assert cli("wait", box).code == 125


def test_wait_until_a_snapshot_is_stored(cli: Cli, box: str) -> None:
    first = cli("exec", "--json", box, "ls").json["snapshot"]
    cli("exec", box, "ls")
    done = cli("wait", "--until", "stored", "--json", short(first))
    assert (done.code, done.json) == (0, {"snapshot": first, "state": "stored"})
    assert cli("wait", "--until", "stored", box) == Ran(0, "", "")
    assert cli("show", "--json", box).json["state"] == "stored"
    assert "--until stored waits for a snapshot" in cli("wait", "--until", "stored", box, "abcd").err
    assert cli("wait", "--until", "stored", "nobody").code == 125
    assert "no node of a fleet" in cli("wait", "--until", "published", box).err


def test_inspect_prints_whatever_is_named(cli: Cli, box: str) -> None:
    cli("exec", "--wait", "stored", box, "ls")  # its state may change between two looks otherwise
    tag = f"tag-{box}"
    head = cli("tag", box, tag, "--json").json["snapshot"]
    line, snapshot, tagged = cli("inspect", box, short(head), tag, "--json").json
    assert line == {"kind": "trajectory", **next(item for item in cli("ls", "--json").json if item["name"] == box)}
    assert snapshot == tagged == {"kind": "snapshot", **cli("show", "--json", head).json}
    assert cli("inspect", box).json == [line]
    assert cli("inspect", box).out.count("\n") > 10
    assert cli("inspect", box, "nobody").code == 4


def test_tags_are_listed(cli: Cli, box: str) -> None:
    tag = f"tag-{box}"
    head = cli("tag", box, tag, "--json").json["snapshot"]
    assert {"name": tag, "snapshot": head, "trajectory": cli("show", "--json", head).json["trajectory"]} in cli(
        "tag", "--list", "--json"
    ).json
    assert [tag, short(head)] in [line.split()[:2] for line in cli("tag", "-l").out.splitlines()]
    assert cli("tag", "--list", box).code == 2


def test_log_graph_is_the_forest_of_one_trajectory_or_all(cli: Cli, box: str) -> None:
    forked = cli("fork", box, "--json").json["trajectories"][0]
    assert cli("wait", "--until", "stored", forked).code == 0  # files are counted in the background
    assert cli("log", "--graph").out == cli("tree").out
    for ref in (box, forked):
        found = cli("log", "--graph", ref, "--json").json
        assert {item["id"] for item in found} == {forked, found[0]["id"]}
        assert found[0]["name"] == box
    assert cli("log", "--graph", "-n", "3", box).code == 2
    assert cli("log").code == 2


def test_rm_all_asks_or_is_forced(daemon: Daemon, cli: Cli) -> None:
    here = ("--state-dir", str(daemon.state_dir), "--socket", str(daemon.socket_path))
    daemon.client.create(name="one")
    daemon.client.fork("one", name="two")
    refused = cli("rm", "--all", *here)
    assert (refused.code, refused.out) == (2, "")
    assert "2 trajectories" in refused.err
    assert "--force" in refused.err
    assert cli("rm", "--all", "one", *here).code == 2
    assert cli("rm", *here).code == 2
    assert len(daemon.client.trajectories()) == 2
    assert len(cli("rm", "--all", "--force", "--json", *here).json["removed"]) == 2
    assert daemon.client.trajectories() == []
    assert cli("rm", "--all", *here) == Ran(0, "", "")


# -- variants of a fork ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[cold]\nname = "c"\n\n[warm]\nargs = []\nevn.A = "1"\n',
            "ways.toml:6: the variant warm has an unknown key 'evn'",
        ),
        ('cold = {evn = {A = "1"}}', "ways.toml:1: the variant cold has an unknown key 'evn'"),
        ("[cold]\n[cold.env]\nA = 1\n", "ways.toml:2: env of the variant cold is not a table of texts"),
        ('[cold]\nname = "x"\nargs = "x"\n', "ways.toml:3: args of the variant cold is not a list of texts"),
        ('[cold]\nname = ["x"]\n', "ways.toml:2: name of the variant cold is not text"),
        ("cold = 1", "ways.toml:1: cold is no variant"),
        ("[cold\n", "(at line 1, column 6)"),
        ("[a]\n[a]\n", "(at line 2"),
        ("", "there is no variant in"),
        ("\udc80", "cannot be read"),
    ],
)
def test_a_file_of_variants_is_refused_with_the_line(cli: Cli, box: str, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ways.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    refused = cli("fork", box, "--variants", str(file))
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--variant", "a:evn.X=1"), "the variant a has an unknown key 'evn.X'"),
        (("--variant", "a:env.=1"), "unknown key 'env.'"),
        (("--variant", "a:name"), "'a:name' is no variant"),
        (("--variant", ":name=x"), "':name=x' is no variant"),
        (("--variant", "a:args='x"), "cannot be split into words"),
        (("--variant", "a:cpus=lots"), "cpus='lots' of the variant a is not a number above 0"),
        (("--variant", "a:state.k=word"), "state.k='word' of the variant a is not JSON; text has quotes there"),
        (("--n", "0"), "'0' is not a whole number from 1 to 256, or with --parallel to 10,000"),
        (("--variant", "a", "--n", "2"), "leave the number out"),
        (("--variants", "/no/such/file"), "No such file"),
    ],
)
def test_a_variant_that_is_refused(cli: Cli, box: str, words: tuple[str, ...], said: str) -> None:
    refused = cli("fork", box, *words)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.err


def test_variants_without_names_are_told_with_their_ids(cli: Cli, box: str) -> None:
    made = cli("fork", box, "--variant", "cold", "--variant", "warm")
    ids = made.out.split()
    said = zip(("cold", "warm"), ids, strict=True)
    assert made.err == "".join(f"snapshotd: {label}: {one[:12]}\n" for label, one in said)
    named = cli("fork", box, "--variant", "cold", "--variant", "warm", "--name", f"{box}-{{variant}}-y")
    assert named.err == "", "their names tell them apart"


def test_a_name_with_a_place_for_the_number(cli: Cli, box: str) -> None:
    made = cli("fork", box, "--n", "2", "--name", f"{box}-{{index}}-x", "--json").json["trajectories"]
    names = {item["id"]: item["name"] for item in cli("ls", "--json").json}
    assert [names[one] for one in made] == [f"{box}-0-x", f"{box}-1-x"]
