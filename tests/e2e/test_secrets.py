"""A planted secret, wherever an agent or a person lets it slip: nothing shown, exported or stored has it, and a resume
still does."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from snapshotd.repo.format.index import Index
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.store.local import LocalStore
from snapshotd.testing.provider import ScriptedProvider
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.runc
PROGRAM = """
import json, os, sys, urllib.request
from snapshotd.agent import (
    approve, checkpoint, current_call, emit, message, messages, model, state, store, task, tasks, tool, Denied)

HERE = os.environ["CONFIGURED"], os.environ["SHAPED"], "ghp_" + os.environ["HALF"]
ALL = " and ".join(HERE)
assert sys.argv[1:] == [HERE[0], HERE[1]], "the program's arguments are the originals"

@tool
def say(text):
    print("printed", text, flush=True)
    print("complained", text, file=sys.stderr, flush=True)
    emit("emitted " + text)
    for start in range(0, len(text), 7):
        emit(text[start:start + 7])
    return {"text": text, text: [text]}

@tool
def fail(text):
    raise ValueError(text)

@tool(side_effect="irreversible", approve="may I use " + ALL + "?", compensate=["true", ALL], key="key-" + ALL)
def pay(text):
    return current_call().key

@model
def ask(prompt):
    return {"reply": ALL}

message("user", ALL)
state["secret"] = ALL
store.put("kept", {"value": ALL, ALL: 1}, namespace="secrets")
said = say(ALL)
assert said == {"text": ALL, ALL: [ALL]}, said
try:
    fail(ALL)
except ValueError as error:
    assert str(error) == ALL, error
assert ask(ALL) == {"reply": ALL}
with task("the task of " + HERE[2]):
    say(ALL)
with task("another") as skipped:
    skipped.skip(ALL)
checkpoint("with " + HERE[2])
asked = approve("is it " + ALL + "?", {"details": ALL})
assert pay(ALL) == "key-" + ALL

body = json.dumps({"model": "m", "messages": [{"role": "user", "content": ALL}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=60) as answer:
    reply = json.load(answer)
assert reply["choices"][0]["message"]["content"] == "the model says " + HERE[0], reply

say("last " + ALL)
assert state["secret"] == ALL
assert [one["name"] for one in tasks()] == ["the task of " + HERE[2], "another"], tasks()
assert tasks()[1]["note"] == ALL, tasks()
assert store.get("kept", namespace="secrets") == {"value": ALL, ALL: 1}
assert ALL in [one["content"] for one in messages()]
with open("/workspace/answer", "w") as file:
    file.write("%s %s" % (asked.by, len(ALL)))
"""


class Planted:
    """What was planted, in all the forms in which something records text."""

    def __init__(self) -> None:
        self.configured = f"hunter-{secrets.token_hex(12)}"
        self.shaped = f"glpat-{secrets.token_hex(10)}"
        self.half = secrets.token_hex(18)
        self.provider_key = f"upstream-{secrets.token_hex(12)}"
        plain = (self.configured, self.shaped, f"ghp_{self.half}", self.provider_key)
        self.needles = [form for text in plain for form in _forms(text.encode())]

    def found_in(self, data: bytes) -> list[bytes]:
        return [needle for needle in self.needles if needle in data]


def _forms(text: bytes) -> Iterator[bytes]:
    yield text
    yield text.hex().encode()
    for shift in range(3):  # where it lies within something that is base64: the characters that hold nothing else
        yield base64.b64encode(b"\0" * shift + text)[-(-shift * 8 // 6) : (shift + len(text)) * 8 // 6]


@pytest.fixture(scope="module")
def planted() -> Planted:
    return Planted()


def _run(snap: Snap, planted: Planted, provider: ScriptedProvider, program: Path) -> str:
    """The program is started, killed with everything else while it asks something, and resumed to its end."""
    command = [
        "run",
        "--runtime",
        "runc",
        "--name",
        "slips",
        "--secret",
        "CONFIGURED",
        "--env",
        "SHAPED",
        "--env",
        f"HALF={planted.half}",
        "--provider",
        f"openai={provider.url}/v1",
        "--provider-key",
        "openai=UPSTREAM",
        program,
        planted.configured,
        planted.shaped,
    ]
    told = Snap(
        snap.state_dir,
        {**snap.env, "CONFIGURED": planted.configured, "SHAPED": planted.shaped, "UPSTREAM": planted.provider_key},
    )
    running = told.follow(*command)
    shown = [_decide(snap, "slips", running, planted)]
    snap.crash()
    shown += running.communicate(timeout=240)
    running = snap.follow("resume", "slips")
    shown.append(_decide(snap, "slips", running, planted))
    out, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    return "".join((*shown, out, errors))


def _decide(snap: Snap, name: str, running: subprocess.Popen[str], planted: Planted) -> str:
    """Say yes to the next question, with a reason that has a secret in it."""

    def waiting() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = snap.json("approvals")
        return found

    wait_until(lambda: running.poll() is not None or bool(waiting()), "something was asked", 240)
    assert running.poll() is None, running.communicate()[1][-3000:]
    (asked,) = waiting()
    looked = snap("approval", asked["id"]).stdout
    decided = snap("approve", asked["id"], "--by", "ann", "--reason", f"it is {planted.configured}").stdout
    return json.dumps(asked) + looked + decided


def _slips_of_a_person(snap: Snap, planted: Planted) -> str:
    """Commands with secrets in their arguments, output and environment; values of the store; edits and forks."""
    half = f"ghp_{planted.half}"
    shown = [
        snap("exec", "slips", "--", "sh", "-c", f"echo {planted.configured} {half}; env >&2").stdout,
        snap(
            "exec",
            "--json",
            "--env",
            f"MORE={half}",
            "slips",
            "--",
            "sh",
            "-c",
            "echo $MORE $CONFIGURED; exit 3",
            code=3,
        ).stdout,
        snap("store", "put", "--text", "secrets", "from-a-person", f"say {half}").stdout,
    ]
    assert half in snap("exec", "slips", "--", f"/no/{half}", code=127).stderr, (
        "who types it is told what is wrong with it"
    )
    head = snap.json("log", "slips")[-1]["id"]
    edited = snap.json("edit", head, "--message", f"user={half} {planted.configured}", "--state", f'more="{half}"')
    shown += [json.dumps(edited), snap("show", "--conversation", edited["trajectory"]).stdout]
    return "".join(shown)


def _shown(snap: Snap, folder: Path) -> Iterator[tuple[str, bytes]]:
    """All lists, views and exports of everything that there is."""

    def out(*command: str) -> tuple[str, bytes]:
        done = snap(*command)
        return " ".join(command), (done.stdout + done.stderr).encode(errors="surrogateescape")

    for words in (
        ["ls"],
        ["ps"],
        ["approvals", "--all"],
        ["store", "ls", "secrets"],
        ["store", "history", "secrets", "kept"],
    ):
        yield out(*words)
        yield out(*words, "--json")
    for trajectory in [one["id"] for one in snap.json("ls")]:
        for words in (["log"], ["journal"], ["state"], ["tasks"], ["effects"]):
            yield out(*words, trajectory)
            yield out(*words, trajectory, "--json")
        if snap("attach", trajectory, code=None).returncode == 0:
            yield out("attach", trajectory)
            yield out("attach", "--json", trajectory)
        for snapshot in snap.json("log", trajectory):
            yield out("show", snapshot["id"])
            yield out("show", "--json", snapshot["id"])
        yield out("show", "--conversation", snapshot["id"])
        before = snap.json("log", trajectory)[0]["parent"]  # in the bundle of the line that it was forked from
        since = () if before is None else ("--since", before)
        snap("export", "--trajectory", trajectory, *since, "-o", folder / trajectory)
        yield f"the bundle of {trajectory}", zlib.decompressobj(47).decompress((folder / trajectory).read_bytes())


def _files(state_dir: Path) -> Iterator[Path]:
    """Of the state directory, but the sandboxes' own."""
    for path in sorted(state_dir.rglob("*")):
        inside = path.relative_to(state_dir).parts[0] in ("layers", "layers.img")
        if not inside and path.is_file() and not path.is_symlink():
            yield path


@contextmanager
def _repository(state_dir: Path) -> Iterator[tuple[PackReader, Index]]:
    repo = state_dir / "repo"
    reader = PackReader(LocalStore(repo / "store"), repo / "index.db", load_key(repo))
    try:
        index = reader.open_index()
        assert index is not None
        yield reader, index
    finally:
        reader.close()


def _known(state_dir: Path) -> set[bytes]:
    """The objects and the packs that are there before anything is planted: the image's."""
    with _repository(state_dir) as (_, index):
        objects = {entry.id for entry in index.objects()}
    return objects | {bytes(path) for path in (state_dir / "repo" / "store").rglob("*")}


def _kept(state_dir: Path, known: set[bytes]) -> Iterator[tuple[str, bytes]]:
    """Every byte of the state directory's files, and what the packs hold in compressed form."""
    for path in _files(state_dir):
        if bytes(path) not in known:
            yield str(path), path.read_bytes()
    with _repository(state_dir) as (reader, index):
        for entry in index.objects():
            if entry.id not in known:
                yield f"object {entry.id.hex()}", bytes(reader.plain_at(entry, keep=False))


@pytest.mark.timeout(600)
def test_a_planted_secret_is_nowhere_in_plain(own_snap: Snap, planted: Planted, tmp_path: Path) -> None:
    snap = own_snap
    plain, _ = snap.create("--runtime", "runc", "--wait", "stored")
    snap("rm", "--force", plain)
    known = _known(snap.state_dir)
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    script = {"steps": [{"text": f"the model says {planted.configured}"}], "api_key": planted.provider_key}
    with ScriptedProvider(script) as provider:
        shown = _run(snap, planted, provider, program)
        assert len(provider.requests) == 1
        assert planted.configured in json.dumps(provider.requests[0]["body"]), "what the provider gets is the original"
    assert snap("cat", "slips:/workspace/answer").stdout.startswith("ann "), "the agent has met all its secrets again"
    assert planted.found_in(shown.encode()) == []
    shown += _slips_of_a_person(snap, planted)
    assert planted.found_in(shown.encode()) == []
    assert "[secret:" in shown
    for name, data in _shown(snap, tmp_path):
        assert planted.found_in(data) == [], name
    for one in snap.json("ls"):
        snap("exec", one["id"], "--wait", "stored", "--", "true")
    snap.stop_daemon()
    marked = 0
    for name, data in _kept(snap.state_dir, known):
        assert planted.found_in(data) == [], name
        marked += b"[secret:env-CONFIGURED:" in data
    assert marked > 3, "markers are where the secrets were"


def test_a_throw_away_fork_has_the_secrets_and_keeps_nothing(own_snap: Snap) -> None:
    """Its program sees the value, its output shows the marker, and neither lies anywhere afterwards."""
    value = secrets.token_hex(12)
    snap = Snap(own_snap.state_dir, {**own_snap.env, "TOKEN": value})
    snap("run", "--runtime", "runc", "--name", "told", "--secret", "TOKEN", "--", "true")
    snap("fork", "told", "--name", "heir")
    spooled = own_snap.state_dir / "repo" / "blobs"
    before, kept = {*spooled.rglob("*")}, _kept_secrets(own_snap)
    for name in ("told", "heir"):
        line = snap.json("exec", "--snapshot", name, "--", "sh", "-c", f'test "$TOKEN" = {value} && echo "$TOKEN"')
        assert line["exit_code"] == 0, line
        assert value not in line["stdout"]
        assert "[secret:env-TOKEN:" in line["stdout"]
    scored = snap.json("score", "told", "--", "sh", "-c", f'test "$TOKEN" = {value}')
    assert [row["score"] for row in scored] == [1.0], scored
    assert {*spooled.rglob("*")} <= before, "nothing refers to its output"
    assert _kept_secrets(own_snap) == kept
    snap("rm", "--force", "heir")
    snap("rm", "--force", "told")


def _kept_secrets(snap: Snap) -> list[Any]:
    connection = apsw.Connection(str(snap.state_dir / "secrets.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return connection.execute("SELECT trajectory, marker FROM secrets ORDER BY 1, 2").fetchall()
    finally:
        connection.close()
