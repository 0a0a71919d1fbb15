"""The commands of durable storage, and `--wait`: what they print, on which stream, with which exit code, and what they
refuse."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from snapshotd.cli import progress
from snapshotd.cli.progress import Meter
from snapshotd.cli.values import Count, Duration, Size
from snapshotd.client.results import Policy, SnapshotInfo
from snapshotd.types import new_id
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon, damage, environment


@pytest.fixture
def fresh(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """A daemon of the test's own, which the commands then talk to (name `cli` before this one)."""
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(daemon.state_dir))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(daemon.socket_path))
    return daemon


# -- --wait ------------------------------------------------------------------------------------------------------------


def test_without_wait_no_answer_says_a_state(cli: Cli, box: str) -> None:
    assert sorted(cli("create", "--json").json) == ["snapshot", "trajectory"]
    assert list(cli("exec", "--json", box, "--", "ls").json) == [
        "exit_code",
        "timed_out",
        "stdout",
        "stderr",
        "snapshot",
    ]
    assert list(cli("fork", "--json", box).json) == ["experiment", "trajectories"]
    assert "state" not in cli("stop", "--json", box).json[0]


@pytest.mark.parametrize("state", ["captured", "stored"])
def test_with_wait_every_answer_says_the_state(cli: Cli, state: str) -> None:
    """A snapshot may be stored already where nothing waits for it."""
    wait, states = ("--wait", state, "--json"), {state, "stored"}
    name = f"w-{new_id()[:8]}"
    made = cli("create", "--name", name, *wait).json
    assert made["state"] in states
    assert cli("exec", *wait, name, "--", "ls").json["state"] in states
    assert cli("rewind", *wait, name, made["snapshot"]).json["state"] in states
    assert cli("fork", *wait, name).json["state"] in states
    finished = [json.loads(line) for line in cli("run", *wait, "--", "ls").out.splitlines()][-1]
    assert (finished["event"], finished["state"] in states) == ("finished", True)
    assert cli("run", "-d", *wait, "--", "ls").json["state"] in states
    assert cli("stop", *wait, name).json[0]["state"] in states
    assert {item["state"] for item in cli("log", "--json", name).json} <= states


def test_wait_as_text(cli: Cli, box: str) -> None:
    assert cli("exec", "--wait", "stored", box, "--", "ls").err.endswith(" ms  stored\n")
    first = cli("log", "-q", box).out.split()[0]
    assert cli("rewind", "--wait", "stored", box, first).err.endswith(" ms  stored\n")
    assert "2 snapshots, stored; " in cli("run", "--wait", "stored", "--", "ls").err
    assert {item["state"] for item in cli("log", "--json", box).json} == {"stored"}
    assert "stored, captured by unchanged" in cli("show", box).out


def test_wait_that_makes_no_sense(cli: Cli, box: str) -> None:
    assert cli("exec", "--wait", "stored", "--snapshot", box, "--", "ls").code == 125
    refused = cli("stop", "--wait", "saved", box)
    assert (refused.code, "captured" in refused.err) == (2, True)


def test_a_snapshot_that_cannot_be_stored_is_an_error_of_its_own(cli: Cli, fresh: Daemon) -> None:
    cli("create", "--name", "box", "--wait", "stored")
    packs = fresh.state_dir / "repo/store/packs"
    packs.rename(packs.with_name("elsewhere"))
    packs.touch()
    assert cli("exec", "--wait", "stored", "box", "--", "touch", "new").code == 125
    stopped = cli("stop", "--wait", "stored", "box")
    assert (stopped.code, "cannot be stored" in stopped.err) == (20, True)
    assert {item["state"] for item in cli("log", "--json", "box").json} == {"stored", "captured"}
    packs.unlink()
    packs.with_name("elsewhere").rename(packs)
    fresh.client.flush()


# -- log ---------------------------------------------------------------------------------------------------------------


def test_log_lists_the_newest_and_says_how_many_are_older(cli: Cli, fresh: Daemon) -> None:
    line, _ = fresh.client.create(name="long")
    for _ in range(104):
        fresh.client.exec(line.id, ["ls"])
    assert [item["seq"] for item in cli("log", "--json", "long").json] == list(range(5, 105))
    assert cli("log", "long").err == "snapshotd: 5 older snapshots not listed; --all lists everything\n"
    assert len(cli("log", "-q", "-n", "3", "long").out.split()) == 3
    assert "102 older" in cli("log", "-q", "-n", "3", "long").err
    everything = cli("log", "-q", "--all", "long")
    assert (len(everything.out.split()), everything.err) == (105, "")
    assert cli("log", "-n", "105", "long").err == ""
    assert cli("log", "-n", "999", "long").err == ""
    assert [cli("log", *words, "long").code for words in (("-n", "0"), ("-n", "x"), ("-n", "3", "--all"))] == [2, 2, 2]


def test_log_of_a_fork_counts_its_own(cli: Cli, fresh: Daemon) -> None:
    fresh.client.create(name="origin")
    fork = fresh.client.fork("origin", name="f").trajectories[0].id
    assert cli("log", "-n", "1", fork).err == ""
    fresh.client.exec(fork, ["ls"])
    assert cli("log", "-n", "1", fork).err == ""
    fresh.client.exec(fork, ["ls"])
    fresh.client.exec(fork, ["ls"])
    assert [item["seq"] for item in cli("log", "--json", fork).json] == [1, 2, 3]
    assert cli("log", "-n", "1", fork).err.startswith("snapshotd: 2 older snapshots")


# -- df, policy, prune -------------------------------------------------------------------------------------------------


def test_df(cli: Cli, fresh: Daemon) -> None:
    fresh.client.create(wait="stored")
    header, *sizes, nothing, counted, captured, stored, lost, pruned = cli("df").out.splitlines()
    assert (header.split(), nothing, counted.split()) == (["TYPE", "SIZE", "BUDGET"], "", ["SNAPSHOTS", "COUNT"])
    for line, name, budget in zip(sizes, ("layers", "repository", "spool"), (r"[\d.]+ GiB", "-", "-"), strict=True):
        assert re.fullmatch(rf"{name} +[\d.]+ K?i?B +{budget}", line), line
    assert [line.split() for line in (captured, stored, lost, pruned)] == [
        ["captured", "0"],
        ["stored", "1"],
        ["lost", "0"],
        ["pruned", "0"],
    ]
    assert cli("df", "--json").json["states"] == {"captured": 0, "stored": 1, "lost": 0, "pruned": 0}


def test_policy(cli: Cli, fresh: Daemon) -> None:
    line, _ = fresh.client.create(name="box")
    empty = dict.fromkeys(("keep_last", "keep_within_s", "keep_every", "keep_failed", "max_bytes"))
    assert cli("policy").out == "every snapshot keeps its files\n"
    assert cli("policy", "--json").json == {"trajectory": None, "policy": empty}
    words = (
        "--keep-last",
        "20",
        "--keep-within",
        "7d",
        "--keep-every",
        "10",
        "--keep-failed",
        "3",
        "--max-size",
        "10G",
    )
    assert cli("policy", *words).out.split() == [*words[:-1], "10.0", "GiB"]
    assert cli("policy", "box").out == cli("policy").out
    own = cli("policy", "box", "--keep-within", "90m", "--json").json
    assert own == {"trajectory": line.id, "policy": {**empty, "keep_within_s": 5400.0}}
    assert cli("policy", "box").out == "--keep-within 90m\n"
    assert cli("policy", "box", "--clear").out == cli("policy").out
    assert cli("policy", "--clear").out == "every snapshot keeps its files\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("policy", "--keep-last", "-1"), "whole number from 0"),
        (("policy", "--keep-last", "9" * 5000), "whole number from 0"),
        (("policy", "--keep-every", "0"), "whole number from 1"),
        (("policy", "--keep-failed", "many"), "whole number from 1"),
        (("policy", "--keep-within", "7"), "such as 12h"),
        (("policy", "--keep-within", "0d"), "such as 12h"),
        (("policy", "--keep-within", "1e9d"), "such as 12h"),
        (("policy", "--max-size", "0"), "such as 512m"),
        (("policy", "--max-size", "much"), "such as 512m"),
        (("policy", "--max-size", "9" * 5000), "such as 512m"),
        (("policy", "--clear", "--keep-last", "5"), "--clear"),
        (("prune", "--grace", "soon", "--force"), "such as 12h"),
        (("prune",), "--force"),
        (("export", "box", "--json"), "-o"),
        (("export", "box", "--format", "zip"), "zip"),
        (("export", "box", "--format", "tar", "--trajectory", "-o", "x"), "one snapshot"),
        (("export", "box", "--format", "oci", "--since", "abcd", "-o", "x"), "one snapshot"),
        (("export", "a", "b", "-o", "x"), "several IDs"),
        (("export", "a", "--with-forks", "-o", "x"), "for atif, jsonl and html"),
        (("export", "a", "--format", "atif", "--trajectory", "-o", "x"), "always has all"),
        (("export", "a", "--format", "jsonl", "--encrypt", "k", "-o", "x"), "are for bundles"),
        (("export", "--format", "jsonl"), "missing argument"),
        (("import",), "name the bundle to import"),
        (("import", "x", "--key", "k"), "--cache and --key go together"),
        (("import", "x", "--cache", "c", "--key", "k"), "name the bundle to import"),
        (("export", "x", "--cache", "c"), "--cache and --key go together"),
        (("export", "x", "-o", "f", "--cache", "c", "--key", "k"), "leave out --cache or -o"),
        (("export", "x", "--format", "tar", "-o", "f", "--encrypt", "k"), "are for bundles"),
        (("import", "/nowhere/at/all"), "/nowhere/at/all"),
        (("import", "/"), "directory"),
        (("import", "/dev/null", "--name", "a/b"), "cannot be a name"),
        (("mount",), "missing argument"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    cli: Cli, words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    before = cli("policy").out
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        done = cli(*words)
    assert (done.code, bool(done.out)) == (2, "--json" in words)
    assert done.err.count("\n") == 1
    assert sentence in done.err
    assert cli("policy").out == before
    assert os.listdir(tmp_path) == []


def test_values() -> None:
    assert [Size().convert(text, None, None) for text in ("1", "10g", "500MiB", "2T")] == [
        1,
        10 << 30,
        500 << 20,
        2 << 40,
    ]
    hours = [Duration().convert(text, None, None) / 3600 for text in ("30m", "1.5h", "7d", "2w", "7200s")]
    assert hours == [0.5, 1.5, 168, 336, 2]
    assert Duration(zero=True).convert("0", None, None) == Duration(zero=True).convert("0s", None, None) == 0
    with pytest.raises(click.UsageError):
        Duration(zero=True).convert("", None, None)
    assert Count(0).convert("007", None, None) == 7
    with pytest.raises(click.UsageError):
        Count(0).convert("٣", None, None)


def test_prune(cli: Cli, pruning: tuple[Daemon, SnapshotInfo]) -> None:
    _, second = pruning
    dry = cli("prune", "--dry-run")
    header, row, totals = dry.out.splitlines()
    assert header.split() == ["SNAPSHOT", "TRAJECTORY", "SEQ", "CREATED", "WHY"]
    assert row.split()[:3] == [second.id[:12], second.trajectory[:12], "1"]
    assert row.endswith("ago  not among the newest 1")
    assert re.fullmatch(
        r"1 snapshot would go, kept: 2; [\d.]+ K?i?B would be freed.*; the repository takes .* KiB", totals
    )
    assert dry.err.startswith("snapshotd: deciding what goes\n")
    assert cli("prune", "--dry-run", "--keep-last", "2").out.startswith("0 snapshots would go")
    report = cli("prune", "--force", "--grace", "0", "--json")
    assert report.err == ""
    assert (report.json["dry_run"], report.json["kept"]) == (False, 2)
    assert report.json["freed_bytes"] > 70_000
    assert report.json["pruned"][0] == {
        "snapshot": second.id,
        "trajectory": second.trajectory,
        "seq": 1,
        "created_at": second.created_at,
        "reason": "not among the newest 1",
    }
    assert " pruned " in cli("log", "box").out.splitlines()[2]
    assert "given up by a retention policy" in cli("show", second.id).out


@pytest.fixture
def pruning(fresh: Daemon) -> tuple[Daemon, SnapshotInfo]:
    """A sandbox `box`, whose second snapshot the policy does not keep."""
    line, _ = fresh.client.create(name="box")
    ids = []
    for _ in range(2):
        made = fresh.client.exec(line.id, ["sh", "-c", "head -c 70000 /dev/urandom > big"], wait="stored").snapshot
        assert made is not None
        ids.append(made.id)
    fresh.client.set_policy(Policy(keep_last=1))
    return fresh, fresh.client.snapshot(ids[0])


@pytest.mark.parametrize(
    ("answer", "code", "state"),
    [("y\n", 0, "pruned"), ("n\n", 1, "stored"), ("\n", 1, "stored"), ("\x04", 1, "stored")],
)
def test_prune_asks_on_a_terminal(pruning: tuple[Daemon, SnapshotInfo], answer: str, code: int, state: str) -> None:
    daemon, second = pruning
    ours, theirs = pty.openpty()
    with open(ours, "wb", buffering=0) as terminal, open(theirs, "rb", buffering=0) as stdin:
        terminal.write(answer.encode())
        argv = [sys.executable, "-m", "snapshotd", "prune"]
        done = subprocess.run(
            argv, env=environment(daemon), stdin=stdin, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == code, done.stderr
    assert re.search(r"Give up the files of 1 snapshot for good, to free .*\? \[y/N\] ", done.stderr)
    assert done.stdout.splitlines()[2].startswith("1 snapshot would go")
    assert (len(done.stdout.splitlines()) == 4) is (code == 0)
    assert daemon.client.snapshot(second.id).state == state


# -- check, repair -----------------------------------------------------------------------------------------------------


def test_check_and_repair(cli: Cli, fresh: Daemon, tmp_path: Path) -> None:
    tmp_path.joinpath(os.fsdecode(b"a\xff")).write_bytes(os.urandom(70_000))
    line, _ = fresh.client.create(name="damaged", workspace=tmp_path, wait="stored")
    healthy = cli("check")
    assert re.fullmatch(r"\d+ objects in \d packs?, .* KiB read: 0 damaged\n", healthy.out)
    assert (healthy.code, healthy.err.splitlines()[0].partition(" of ")[0]) == (0, "snapshotd: checked 1")
    assert cli("repair").out == "nothing was wrong\n"
    damage(fresh)
    found = cli("check", "--read-data")
    assert found.code == 20
    rows = found.out.splitlines()
    assert rows[0].split() == ["SNAPSHOT", "PATH", "PACK", "WHAT"]
    (row,) = [row for row in rows if "/workspace" in row]
    assert row.split(maxsplit=3)[:2] == [line.head[:12], "/workspace/a\\xff"]
    assert row.endswith("its frame is missing or damaged")
    assert re.fullmatch(r"\d+ objects in \d packs?, .* KiB read: \d damaged", rows[-1])
    assert "`snapshotd repair`" in found.err.splitlines()[-1]
    report = cli("check", "--json")
    assert report.code == 20
    assert report.json["unreadable"] == [line.head]
    paths = [one["path_b64"] for one in report.json["damages"] if "path_b64" in one]
    assert [base64.b64decode(path) for path in paths] == [b"/workspace/a\xff"]
    repaired = cli("repair")
    assert repaired.code == 0, "its layers are here"
    assert repaired.out.startswith("saved ")
    assert f"snapshot {line.head[:12]} was stored again from its layers\n" in repaired.out
    assert cli("check", "--json").code == 0
    assert cli("repair", "--json").json == {"actions": [], "lost": []}


# -- export, import, mount ---------------------------------------------------------------------------------------------


def test_export_to_a_file_and_back(cli: Cli, fresh: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = fresh.client.create(name="box")[1].id
    cli("exec", "box", "--", "sh", "-c", "head -c 70000 /dev/urandom > big")
    done = cli("export", "box", "--trajectory", "--since", first, "-o", "box.bundle")
    assert (done.code, done.out) == (0, "")
    assert re.search(r"\nsnapshotd: snapshot 1 of 1\n7\d\.\d KiB in box.bundle\n$", done.err), done.err
    answer = cli("export", "box", "--format", "oci", "-o", "image.tar", "--json")
    size = (tmp_path / "image.tar").stat().st_size
    assert (answer.json, answer.err) == ({"file": "image.tar", "bytes": size, "warnings": []}, "")
    cli("export", "box", "--trajectory", "-o", "all.bundle")
    head = fresh.client.trajectory("box").head
    fresh.client.remove("box", force=True)
    taken = cli("import", "all.bundle", "--name", "copy")
    assert taken.code == 0
    assert cli("show", "--json", "copy").json["trajectory"] == taken.out.strip()
    assert "snapshotd: snapshot 2 of 2" in taken.err
    assert fresh.client.trajectory("copy").head == head
    answer = cli("import", "all.bundle", "--wait", "stored", "--json")
    assert list(answer.json) == ["trajectories", "snapshot_count", "warnings", "state"]
    assert (answer.json["snapshot_count"], answer.json["state"], answer.err) == (0, "stored", "")
    cli("create", "--name", "taken")
    fresh.client.remove("copy", force=True)
    assert cli("import", "all.bundle", "--name", "taken").code == 6


def test_trajectories_go_behind_each_other(cli: Cli, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = f"other-{new_id()[:8]}"
    cli("create", "--name", other)
    forked = cli("fork", "--json", other).json["trajectories"]
    ids = [cli("inspect", name, "--json").json[0]["id"] for name in (box, other)]
    for one in (*ids, *forked):
        cli("exec", one, "ls")
    done = cli("export", box, other, "--format", "jsonl", "--with-forks", "-o", "train.jsonl", "--json")
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["trajectory"] for line in lines] == [*ids, *forked]
    assert done.json == {"file": "train.jsonl", "bytes": (tmp_path / "train.jsonl").stat().st_size, "warnings": []}
    (alone,) = cli("export", other, "--format", "atif").out.splitlines()
    assert json.loads(alone)["trajectory_id"] == ids[1]


def test_a_failed_export_has_the_errors_code_and_no_file(
    cli: Cli, fresh: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("export", "nobody", "-o", "x").code == 4
    cli("create", "--name", "box")
    cli("exec", "--wait", "stored", "box", "--", "sh", "-c", "head -c 3000000 /dev/urandom > big")
    assert cli("export", "box", "-o", "missing/x").code == 2
    assert cli("export", "box", "-o", "/dev/full").code == 12
    damage(fresh)
    failed = cli("export", "box", "-o", "x")
    assert failed.code == 20, failed
    assert os.listdir(tmp_path) == []
    short = cli("export", "box")
    assert short.code == 20, "what went through the pipe is not whole, and the exit code says so"
    assert short.out


def test_export_and_import_through_pipes(fresh: Daemon) -> None:
    line, _ = fresh.client.create(name="box")
    one = [sys.executable, "-m", "snapshotd", "export", "box", "--trajectory"]
    two = [sys.executable, "-m", "snapshotd", "import", "-"]
    with subprocess.Popen(one, env=environment(fresh), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as export:
        done = subprocess.run(
            two, env=environment(fresh), stdin=export.stdout, capture_output=True, text=True, check=False, timeout=60
        )
    assert (export.returncode, done.returncode) == (0, 0), done.stderr
    assert done.stdout.strip() == line.id
    assert "all snapshots of the bundle are here already" in done.stderr


@pytest.mark.parametrize("words", [["export", "box"], ["import", "-"]])
def test_a_terminal_is_no_place_for_a_bundle(fresh: Daemon, words: list[str]) -> None:
    fresh.client.create(name="box")
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "snapshotd", *words]
    with open(ours, "rb", buffering=0), open(theirs, "r+b", buffering=0) as terminal:
        done = subprocess.run(
            argv,
            env=environment(fresh),
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert "terminal" in done.stderr


def test_a_refused_import_ends_while_its_input_does_not(fresh: Daemon) -> None:
    """The sending thread sits in a read of standard input that never ends; the command must not."""
    argv = [sys.executable, "-m", "snapshotd", "import", "-"]
    with subprocess.Popen(argv, env=environment(fresh), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            running.stdin.write(b"this is no bundle" * 1_000_000)
        assert running.wait(60) == 2
        assert b"no bundle of snapshotd" in running.stderr.read()


def test_mount_and_umount(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("mount", "all").code == 2
    (tmp_path / "all").mkdir()
    assert cli("mount", "all", "--json").json == {"mounted": str(tmp_path / "all")}
    assert cli("mount", "all").code == 6
    assert cli("umount", "all", "--json").json == {"unmounted": str(tmp_path / "all")}
    assert cli("umount", "all").code == 4


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_bar_where_standard_error_is_a_terminal(fresh: Daemon) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "snapshotd", "check"]
    with open(ours, "rb", buffering=0) as reader, open(theirs, "wb", buffering=0) as terminal:
        env = {**environment(fresh), "TERM": "xterm", "COLUMNS": "100"}
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, check=True, timeout=60
        )
        shown = reader.read(1 << 16).decode()
    assert done.stdout == b"0 objects in 0 packs: 0 damaged\n"
    assert "━" in shown
    assert "snapshotd: " not in shown


def test_a_meter_without_a_terminal_does_not_fill_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Meter("checking") as meter:
        for number in range(1, 401):
            now[0] += 0.02
            meter.line(f"checked {number} of 400 packs")
        meter.line("read 3 large contents")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "snapshotd: checked 1 of 400 packs"
    assert said[-2:] == ["snapshotd: checked 400 of 400 packs", "snapshotd: read 3 large contents"]
    assert len(said) == 4, said


def test_a_meter_follows_lines_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Meter("checking") as meter:
        meter.line("pack 3 of 12 [bold]")
        task = meter._bar.tasks[0]  # type: ignore[union-attr]
        assert (task.completed, task.total, task.description) == (3, 12, "pack 3 of 12 [bold]")
        meter.line("writing\x1b[2J")
        assert task.description == "writing\\x1b[2J"
    with Meter("importing", total_bytes=100) as meter:
        meter.show_bytes(40)
        meter.line("7 of 9")
        task = meter._bar.tasks[0]  # type: ignore[union-attr]
        assert (task.completed, task.total, task.fields["detail"]) == (40, 100, "40 B")
