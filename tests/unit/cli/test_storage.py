"""The commands of durable storage, and `--wait`: what they print, on which stream, with which exit code, and what they
refuse."""

from __future__ import annotations

import base64
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from snapshotd.cli import progress
from snapshotd.cli.progress import Meter
from snapshotd.cli.values import Count, Duration, Size
from snapshotd.types import new_id
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon, environment
from tests.unit.daemon.process import start_fake as start_daemon  # noqa: F401 - see conftest.py

MIB = 1 << 20


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
    wait = ("--wait", state, "--json")
    name = f"w-{new_id()[:8]}"
    made = cli("create", "--name", name, *wait).json
    assert made["state"] == state
    assert cli("exec", *wait, name, "--", "ls").json["state"] == state
    assert cli("rewind", *wait, name, made["snapshot"]).json["state"] == state
    assert cli("fork", *wait, name).json["state"] == state
    finished = [json.loads(line) for line in cli("run", *wait, "--", "ls").out.splitlines()][-1]
    assert (finished["event"], finished["state"]) == ("finished", state)
    assert cli("run", "-d", *wait, "--", "ls").json["state"] == state
    assert cli("stop", *wait, name).json[0]["state"] == state
    assert {item["state"] for item in cli("log", "--json", name).json} == {state}


def test_wait_as_text(cli: Cli, box: str) -> None:
    assert cli("exec", "--wait", "stored", box, "--", "ls").err.endswith("2.1 ms  stored\n")
    first = cli("log", "-q", box).out.split()[0]
    assert cli("rewind", "--wait", "stored", box, first).err.endswith("2.1 ms  stored\n")
    assert "2 snapshots, stored; " in cli("run", "--wait", "stored", "--", "ls").err
    assert {item["state"] for item in cli("log", "--json", box).json} == {"stored"}
    assert "stored, captured by pivot" in cli("show", box).out


def test_wait_that_makes_no_sense(cli: Cli, box: str) -> None:
    assert cli("exec", "--wait", "stored", "--snapshot", box, "--", "ls").code == 125
    refused = cli("stop", "--wait", "saved", box)
    assert (refused.code, "captured" in refused.err) == (2, True)


def test_a_snapshot_that_cannot_be_stored_is_an_error_of_its_own(cli: Cli) -> None:
    name = f"full-{new_id()[:8]}"
    assert cli("create", "--name", name).code == 0
    assert cli("exec", "--wait", "stored", name, "--", "ls").code == 125
    assert cli("stop", "--wait", "stored", name).code == 12
    assert len(cli("log", "-q", name).out.split()) == 2


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
    fresh.client.create()
    assert cli("df").out.splitlines() == [
        "TYPE            SIZE    BUDGET",
        "layers       3.0 GiB  20.0 GiB",
        "repository   1.0 GiB         -",
        "spool       12.0 KiB         -",
        "",
        "SNAPSHOTS  COUNT",
        "captured       1",
        "stored         1",
        "lost           0",
        "pruned         0",
        "1 of them wait to be stored",
    ]
    assert cli("df", "--json").json["states"] == {"captured": 1, "stored": 1, "lost": 0, "pruned": 0}


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


def test_prune(cli: Cli, fresh: Daemon) -> None:
    line, first = fresh.client.create(name="box")
    fresh.client.exec(line.id, ["ls"])
    fresh.client.flush()
    dry = cli("prune", "--dry-run")
    header, row, totals = dry.out.splitlines()
    assert header.split() == ["SNAPSHOT", "TRAJECTORY", "SEQ", "CREATED", "WHY"]
    assert row.split()[:3] == [first.id[:12], line.id[:12], "0"]
    assert row.endswith("ago  beyond the newest")
    assert (
        totals
        == "1 snapshot would go, kept: 1; 1000 B would be freed, 2.0 MiB of layers evicted; the repository takes 1.0 GiB"
    )
    assert dry.err == "snapshotd: looking at the snapshots, grace 600 s\n"
    assert cli("prune", "--dry-run", "--keep-last", "2").out.startswith("0 snapshots would go")
    report = cli("prune", "--force", "--grace", "0", "--json")
    assert report.err == ""
    assert (report.json["dry_run"], report.json["kept"], report.json["freed_bytes"]) == (False, 1, 1000)
    assert report.json["pruned"][0] == {
        "snapshot": first.id,
        "trajectory": line.id,
        "seq": 0,
        "created_at": first.created_at,
        "reason": "beyond the newest",
    }
    assert cli("log", "box").out.splitlines()[1].split()[-2] == "pruned"
    assert "given up by a retention policy" in cli("show", first.id).out


@pytest.mark.parametrize(
    ("answer", "code", "state"),
    [("y\n", 0, "pruned"), ("n\n", 1, "stored"), ("\n", 1, "stored"), ("\x04", 1, "stored")],
)
def test_prune_asks_on_a_terminal(fresh: Daemon, answer: str, code: int, state: str) -> None:
    line, first = fresh.client.create(name="box")
    fresh.client.exec(line.id, ["ls"], wait="stored")
    ours, theirs = pty.openpty()
    with open(ours, "wb", buffering=0) as terminal, open(theirs, "rb", buffering=0) as stdin:
        terminal.write(answer.encode())
        argv = [sys.executable, "-m", "snapshotd", "prune"]
        done = subprocess.run(
            argv, env=environment(fresh), stdin=stdin, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == code, done.stderr
    assert "Give up the files of 1 snapshot for good, to free 1000 B? [y/N] " in done.stderr
    assert done.stdout.splitlines()[2].startswith("1 snapshot would go")
    assert (len(done.stdout.splitlines()) == 4) is (code == 0)
    assert fresh.client.snapshot(first.id).state == state


# -- check, repair -----------------------------------------------------------------------------------------------------


def test_check_and_repair(cli: Cli, fresh: Daemon) -> None:
    healthy = cli("check")
    assert (healthy.code, healthy.out) == (0, "100 objects in 2 packs: 0 damaged\n")
    assert healthy.err == "snapshotd: pack 1 of 2\nsnapshotd: pack 2 of 2\n"
    assert cli("repair").out == "nothing was wrong\n"
    line, _ = fresh.client.create(name="damaged")
    found = cli("check", "--read-data")
    assert found.code == 20
    rows = found.out.splitlines()
    assert rows[0].split() == ["SNAPSHOT", "PATH", "PACK", "WHAT"]
    assert rows[1].split(maxsplit=3) == [
        line.head[:12],
        "/workspace/a\\xff",
        "pack-7",
        "its bytes are not what was stored",
    ]
    assert rows[2].split(maxsplit=3) == ["-", "-", "pack-8", "the pack is too short"]
    assert rows[3] == "100 objects in 2 packs, 5.0 MiB read: 2 damaged"
    assert "`snapshotd repair`" in found.err.splitlines()[-1]
    report = cli("check", "--json")
    assert report.code == 20
    assert report.json["unreadable"] == [line.head]
    assert base64.b64decode(report.json["damages"][0]["path_b64"]) == b"/workspace/a\xff"
    assert "path_b64" not in report.json["damages"][1]
    repaired = cli("repair")
    assert (repaired.code, repaired.out) == (20, f"the index was rebuilt\nlost: {line.head}\n")
    assert cli("check", "--json").code == 0
    assert cli("repair", "--json").json == {"actions": [], "lost": []}


# -- export, import, mount ---------------------------------------------------------------------------------------------


def test_export_to_a_file_and_back(cli: Cli, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("export", box, "--trajectory", "--since", "abcd", "-o", "box.bundle")
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines() == [
        "snapshotd: 1 of 3 MiB",
        "snapshotd: warning: one socket was left out",
        "3.0 MiB in box.bundle",
    ]
    assert (tmp_path / "box.bundle").read_bytes().startswith(b"BUNDLE bundle True abcd\n")
    answer = cli("export", box, "--format", "oci", "-o", "image.tar", "--json")
    assert (answer.json, answer.err) == (
        {"file": "image.tar", "bytes": 3 * MIB, "warnings": ["one socket was left out"]},
        "",
    )
    taken = cli("import", "box.bundle", "--name", f"{box}-copy")
    assert taken.code == 0
    assert cli("show", "--json", f"{box}-copy").json["trajectory"] == taken.out.strip()
    assert f"warning: {3 * MIB} bytes came" in taken.err
    answer = cli("import", "box.bundle", "--wait", "stored", "--json")
    assert list(answer.json) == ["trajectories", "snapshot_count", "warnings", "state"]
    assert (answer.json["snapshot_count"], answer.json["state"], answer.err) == (1, "stored", "")
    assert cli("import", "box.bundle", "--name", box).code == 6


def test_trajectories_go_behind_each_other(cli: Cli, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = f"other-{new_id()[:8]}"
    cli("create", "--name", other)
    ids = [cli("inspect", name, "--json").json[0]["id"] for name in (box, other)]
    done = cli("export", box, other, "--format", "jsonl", "--with-forks", "-o", "train.jsonl", "--json")
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert lines == [{"id": one, "forks": 1} for one in ids]
    assert done.json == {"file": "train.jsonl", "bytes": (tmp_path / "train.jsonl").stat().st_size, "warnings": []}
    assert [json.loads(line)["forks"] for line in cli("export", box, "--format", "atif").out.splitlines()] == [0]


def test_a_failed_export_has_the_errors_code_and_no_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"damaged-{new_id()[:8]}"
    cli("create", "--name", name)
    failed = cli("export", name, "-o", "x")
    assert failed.code == 20
    assert "pack-7" in failed.err.splitlines()[-1]
    assert cli("export", "nobody", "-o", "x").code == 4
    assert cli("export", name, "-o", "missing/x").code == 2
    assert cli("export", name, "-o", "/dev/full").code == 12
    assert os.listdir(tmp_path) == []
    short = cli("export", name)
    assert (short.code, len(short.out)) == (20, MIB), (
        "what went through the pipe is not whole, and the exit code says so"
    )


def test_export_and_import_through_pipes(fresh: Daemon) -> None:
    fresh.client.create(name="box")
    one = [sys.executable, "-m", "snapshotd", "export", "box"]
    two = [sys.executable, "-m", "snapshotd", "import", "-", "--name", "copy"]
    with subprocess.Popen(one, env=environment(fresh), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as export:
        done = subprocess.run(
            two, env=environment(fresh), stdin=export.stdout, capture_output=True, text=True, check=False, timeout=60
        )
    assert (export.returncode, done.returncode) == (0, 0), done.stderr
    assert fresh.client.trajectory("copy").id == done.stdout.strip()
    assert fresh.client.status()["imported"] == {done.stdout.strip(): 3 * MIB}


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
        running.stdin.write(b"this is no bundle")
        running.stdin.flush()
        assert running.wait(60) == 2
        assert b"this is no bundle of snapshotd" in running.stderr.read()


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
    assert done.stdout == b"100 objects in 2 packs: 0 damaged\n"
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
        meter.moved(40)
        meter.line("7 of 9")
        task = meter._bar.tasks[0]  # type: ignore[union-attr]
        assert (task.completed, task.total, task.fields["detail"]) == (40, 100, "40 B")
