"""The commands for what waits for a person, the key-value store, and the secrets of a sandbox."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from snapshotd.cli.commands.running.create import command as create
from snapshotd.cli.documents import as_page, short_json
from snapshotd.cli.values import sandbox_keywords
from snapshotd.types import new_id, short
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon, environment

# -- approvals ---------------------------------------------------------------------------------------------------------


def asked(daemon: Daemon, box: str, tool: str = "deploy") -> str:
    """The id of a question to a person, by a program outside of the sandbox."""
    approval = daemon.client.ask(
        box, new_id(), tool, {"words": ["ask"]}, side_effect="irreversible", question="really\x1b?"
    )
    assert approval is not None
    return approval.id


def test_approvals_are_listed_and_shown(cli: Cli, box: str, shared_daemon: Daemon) -> None:
    cli("exec", box, "--", "sh", "-c", r"touch $(printf '0\377.txt')")
    identity = asked(shared_daemon, box)
    header, *rows = cli("approvals").out.splitlines()
    assert header.split() == [
        "APPROVAL",
        "TRAJECTORY",
        "TOOL",
        "SIDE",
        "EFFECT",
        "STATUS",
        "ASKED",
        "EXPIRES",
        "BY",
        "WHAT",
    ]
    row = next(row for row in rows if row.startswith(short(identity)))
    assert "deploy  irreversible  pending" in row
    assert row.endswith("really\\x1b?")
    assert short(identity) in cli("approvals", "-q").out.split()
    shown = cli("approval", short(identity)).out
    for expected in (
        identity,
        box,
        "pending",
        "really\\x1b?",
        '"words": [',
        "A /workspace/0\\xff.txt",
        "files that changed since snapshot",
    ):
        assert expected in shown
    view = cli("approval", "--json", identity).json
    (listed,) = [one for one in cli("approvals", "--json").json if one["id"] == identity]
    assert {key: view[key] for key in listed} == listed
    assert list(view)[len(listed) :] == ["changes", "more", "since"]
    assert base64.b64decode(view["changes"][0]["path_b64"]) == b"/workspace/0\xff.txt"


def test_an_approval_is_given_once(cli: Cli, box: str, tmp_path: Path, shared_daemon: Daemon) -> None:
    identity = asked(shared_daemon, box)
    (tmp_path / "less.json").write_text('{"words": []}')
    done = cli("approve", identity[:8], "--reason", "fine\x1b", "--by", "ann", "--arguments", f"{tmp_path}/less.json")
    assert re.fullmatch(rf"{short(identity)}  approved by ann at \d{{4}}-.*Z: fine\\x1b\n", done.out)
    assert short(identity) not in cli("approvals", "-q").out.split()
    assert short(identity) in cli("approvals", "-q", "--all").out.split()
    assert '"words": []' in cli("approval", identity).out.partition("as approved:")[2]
    again = cli("deny", identity)
    assert (again.code, again.out) == (6, "")
    assert "is approved by ann; it cannot be decided again" in again.err


def test_a_denial_and_who_decides(cli: Cli, box: str, shared_daemon: Daemon) -> None:
    identity = asked(shared_daemon, box)
    done = cli("deny", identity, "--reason", "too much", "--json").json
    assert [(item["id"], item["status"], item["reason"]) for item in done] == [(identity, "denied", "too much")]
    assert done[0]["by"], "the user who runs it"
    assert cli("approve", "ffffffff").code == 4
    assert cli("approve").code == 2
    assert "for one approval" in cli("approve", "abcd", "efab", "--arguments", "-").err


def test_a_stale_approval_is_a_conflict(cli: Cli, box: str, shared_daemon: Daemon) -> None:
    cli("exec", "-d", box, "--", "snapshotd-agent", "begin", "deploy", "--approve", "--side-effect", "irreversible")
    own = shared_daemon.client.trajectory(box).id
    eventually(lambda: own in {one.trajectory for one in shared_daemon.client.approvals()})
    (identity,) = [one.id for one in shared_daemon.client.approvals() if one.trajectory == own]
    cli("exec", box, "--", "touch", "new")
    refused = cli("approve", identity)
    assert refused.code == 6
    assert "stale" in refused.err


def test_approvals_are_watched(daemon: Daemon) -> None:
    client = daemon.client
    box = client.create(name="box")[0]
    asked(daemon, "box", "first")
    argv = [sys.executable, "-m", "snapshotd", "approvals", "--watch"]
    with subprocess.Popen(
        argv, env=environment(daemon), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        waiting = client.approvals()[0]
        first = watching.stdout.readline()
        assert (
            first
            == f"{short(waiting.id)}  pending  first  of {short(box.id)}; `snapshotd approval {short(waiting.id)}` shows it\n"
        )
        client.deny(waiting.id)
        assert watching.stdout.readline() == f"{short(waiting.id)}  denied  first  of {short(box.id)}\n"
        asked(daemon, "box", "second")
        assert "  pending  second  " in watching.stdout.readline()
        daemon.terminate()
        assert "waits on" in watching.stderr.read()
        assert watching.wait(60) == 9


def test_an_approval_of_a_run_is_a_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"event": "approval", "id": "a" * 32, "name": "deploy\x1b", "status": "pending"},
        {"event": "approval", "id": "a" * 32, "name": "deploy", "status": "approved"},
        {"event": "finished", "trajectory": "b" * 32, "exit_code": 0, "snapshot_count": 1},
    ]
    monkeypatch.setattr("snapshotd.client.client.Snapshotd.events", lambda *_, **__: iter(events))
    lines = cli("run", "--isolation", "none", "--", "ls").err.splitlines()
    assert lines[0].startswith("⏸ deploy\\x1b waits for approval: `snapshotd approval aaaaaaaaaaaa`")
    assert lines[1] == "⏵ deploy: approval aaaaaaaaaaaa is approved"


# -- store -------------------------------------------------------------------------------------------------------------


def test_the_store(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    space = f"team/{new_id()[:8]}"
    assert cli("store", "put", space, "plan", '{"owner": {"name": "ann"}}', "--if-version", "0").out == "1\n"
    assert cli("store", "get", space, "plan").out == '{\n  "owner": {\n    "name": "ann"\n  }\n}\n'
    assert cli("store", "put", space, "plan", "2", "--if-version", "0").code == 6
    stored = cli("store", "put", space, "plan", "--text", "all\x1b well", "--ttl", "2h", "--json").json
    assert (stored["version"], stored["value"]) == (2, "all\x1b well")
    created, expires = (datetime.fromisoformat(stored[key]) for key in ("created_at", "expires_at"))
    assert expires - created == timedelta(hours=2)
    header, row = cli("store", "ls", space).out.splitlines()
    assert header.split() == ["NAMESPACE", "KEY", "VERSION", "CREATED", "EXPIRES", "VALUE"]
    assert row.endswith('"all\\u001b well"')
    assert cli("store", "get", space, "plan", "--version", "1", "--json").json["value"] == {"owner": {"name": "ann"}}
    cli("store", "put", space, "other", '{"owner": {"name": "ann"}}')
    found = cli("store", "ls", "team", "--prefix", "o", "--where", 'owner.name="ann"', "--json").json
    assert [item["key"] for item in found if item["namespace"] == space] == ["other"]
    assert cli("store", "ls", space, "--limit", "1", "--after", "other").out.splitlines()[1].split()[1] == "plan"
    assert cli("store", "ls", space, "--tenant", "else").out.count("\n") == 1
    assert cli("store", "rm", space, "plan", "--if-version", "1").code == 6
    assert cli("store", "rm", space, "plan", "--json").json == {"removed": ["plan"]}
    assert cli("store", "get", space, "plan").code == 4
    versions = cli("store", "history", space, "plan").out.splitlines()[1:]
    assert [line.split()[2] for line in versions] == ["3", "2", "1"]
    assert versions[0].endswith("deleted")


def test_the_store_takes_standard_input(daemon: Daemon) -> None:
    argv = [sys.executable, "-m", "snapshotd", "store", "put", "notes", "today", "-"]
    done = subprocess.run(argv, env=environment(daemon), input=b'["x"]', capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert daemon.client.get_value("notes", "today").value == ["x"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["put", "a", "k", "text"], "is not JSON"),
        (["put", "a", "k", "1", "--ttl", "7"], "such as 12h"),
        (["put", "/a", "k", "1"], "namespace"),
        (["ls", "a", "--where", "x"], "FIELD=JSON"),
        (["ls", "a", "--where", "x=ann"], "is not JSON"),
        (["ls", "a", "--where", "x=[1]"], "one value"),
        (["ls", "a", "--limit", "0"], "whole number"),
    ],
)
def test_mistakes_with_the_store(cli: Cli, words: list[str], sentence: str) -> None:
    done = cli("store", *words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert sentence in done.err


# -- secrets and providers ---------------------------------------------------------------------------------------------


def test_secrets_reach_the_sandbox(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "sesame")
    made = cli("create", "--secret", "TOKEN", "--secret", "B=x=yellow").out.strip()
    assert cli("exec", made, "--", "sh", "-c", 'test "$TOKEN $B" = "sesame x=yellow"').code == 0
    assert "sesame" not in cli("exec", made, "--", "sh", "-c", "echo $TOKEN").out


def test_providers_have_the_keys_of_this_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key one")
    monkeypatch.setenv("OTHER", "key two")
    words = [
        "--provider",
        "openai",
        "--provider",
        "anthropic=http://127.0.0.1:9/a",
        "--provider-key",
        "anthropic=OTHER",
    ]
    found = sandbox_keywords(create.make_context("create", words).params)["providers"]
    assert [(one.kind, one.base_url, one.api_key) for one in found] == [
        ("openai", None, "key one"),
        ("anthropic", "http://127.0.0.1:9/a", "key two"),
    ]
    assert "the recording gateway needs a sandbox with isolation" in cli("create", "--provider", "openai").err
    monkeypatch.delenv("OPENAI_API_KEY")
    run = ("run", "-d", "--isolation", "none", "--provider")
    unasked = cli(*run, "openai", "--", "ls")
    assert (unasked.code, unasked.out) == (125, "")
    assert "OPENAI_API_KEY is not set here" in unasked.err, "its own service answers nobody without a key"
    noted = cli(*run, "openai=http://127.0.0.1:9/v1", "--", "ls")
    assert "OPENAI_API_KEY is not set here" in noted.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--secret", "=sesame"], "no name"),
        (["--secret", "SURELY_NOT_SET_HERE"], "not set here"),
        (["--secret", "A=sesame", "--env", "A=1"], "as a variable and as a secret"),
        (["--provider", "other"], "openai or anthropic"),
        (["--provider", "=sesame"], "KIND[=URL]"),
        (["--provider-key", "openai=X"], "--provider openai"),
        (["--provider", "openai", "--provider-key", "openai=SURELY_NOT_SET_HERE"], "SURELY_NOT_SET_HERE is not set"),
        (["--provider", "openai", "--provider", "openai=http://h"], "two providers"),
        (["--provider", "openai=https://ann:sesame@h"], "malformed"),
    ],
)
def test_mistakes_with_secrets_are_told_without_them(
    cli: Cli, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key one")
    done = cli("create", *words)
    assert (done.code, done.out, done.err.count("\n")) == (125, "", 1)
    assert sentence in done.err
    assert words[1] == "=sesame" or "sesame" not in done.err


# -- small things ------------------------------------------------------------------------------------------------------


def test_values_are_safe_to_show() -> None:
    assert short_json({"a": "\x1b\u202e☃"}) == '{"a": "\\u001b\\u202e☃"}'
    assert short_json("x" * 100) == '"' + "x" * 58 + "…"
    page = as_page({"a": "\x7f\u202e☃\n\U000e0001"})
    assert page.replace("\n", "").isprintable()
    assert json.loads(page) == {"a": "\x7f\u202e☃\n\U000e0001"}


def test_completion_knows_approvals_and_tasks(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    daemon.client.exec("box", ["plan", "plan", "build"])
    identity = asked(daemon, "box")

    def completed(line: str, number: int) -> str:
        words = {"_SNAPSHOTD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(number)}
        argv = [sys.executable, "-c", "from snapshotd.cli.main import main; main()"]
        env = {**environment(daemon), **words}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60).stdout

    assert short(identity) in completed("snapshotd approve ", 2)
    assert "build" in completed("snapshotd retry box b", 3)
