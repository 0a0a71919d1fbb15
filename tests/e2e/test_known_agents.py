"""`snapshotd run NAME`: agents that come with a profile, and profiles of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import INSTALL_TIMEOUT_S, KEY, Agents, bash, provider
from tests.e2e.person import Person
from tests.e2e.support import Snap
from tests.kept import CACHE

PAGE = Path(__file__).parents[2] / "docs" / "agents-you-run.md"
KEYS = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY"), KEY)


def _known(snap: Snap, **env: str) -> Snap:
    """Commands that install agents into the cache of the tests."""
    found = Snap(snap.state_dir, {**snap.env, **KEYS, "XDG_CACHE_HOME": str(CACHE), **env})
    found.timeout_s = INSTALL_TIMEOUT_S
    return found


def _run(snap: Snap, *words: str | Path) -> str:
    trajectory = snap("run", "--detach", "--runtime", "runc", *words).stdout.strip()
    snap("attach", trajectory)
    return trajectory


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Claude Code", "anthropic"),
        ("Codex", "openai"),
        ("Gemini CLI", "gemini"),
        ("OpenCode", "anthropic"),
        ("Aider", "openai"),
    ],
)
def test_the_page_begins_in_three_lines(
    snap: Snap, runc_ready: None, full_image: str, tmp_path: Path, heading: str, kind: str
) -> None:
    """The commands of the page as they are. The shell's `snapshotd` adds the address of the scripted provider."""
    block = PAGE.read_text().split(f"## {heading}\n")[1].split("```bash\n")[1].split("```")[0]
    assert len(block.splitlines()) <= 3
    (tmp_path / "project").mkdir()
    more = {"toolless": [{"text": "A title"}]} if kind != "openai" else {}
    with provider(tmp_path, *[{"text": "Done."}] * 4, **more) as at:  # a prompt may hold replies as examples
        wrapper = tmp_path / "snapshotd"
        options = f"--runtime runc --image {full_image} --provider {kind}={at.url}"
        wrapper.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m snapshotd run {options} "$@"\n')
        wrapper.chmod(0o755)
        env = {**_known(snap).env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = "\n".join(line.replace("=...", f"={KEY}") for line in block.splitlines())
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path / "project",
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Done." in done.stdout
        assert at.asked()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("agent", "kind", "call", "words"),
    [
        pytest.param(
            "claude",
            "anthropic",
            {"name": "Bash", "arguments": {"command": "echo hello > greeting", "description": "x"}},
            ("--model", "claude-sonnet-4-5", "-p", "do it"),
            id="claude",
        ),
        pytest.param(
            "codex",
            "openai",
            {"name": "exec_command", "arguments": {"cmd": "echo hello > greeting", "yield_time_ms": 30000}},
            ("exec", "--skip-git-repo-check", "-m", "gpt-5", "do it"),
            id="codex",
        ),
        pytest.param(
            "opencode",
            "anthropic",
            {"name": "bash", "arguments": {"command": "echo hello > greeting", "description": "x"}},
            ("run", "--model", "anthropic/claude-sonnet-4-5", "do it"),
            id="opencode",
        ),
    ],
)
def test_one_line_runs_an_agent(
    snap: Snap, runc_ready: None, tmp_path: Path, agent: str, kind: str, call: dict[str, Any], words: tuple[str, ...]
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a").write_text("a\n")
    known = _known(snap)
    with provider(
        tmp_path, {"text": "I do.", "calls": [call]}, {"text": "Done."}, toolless=[{"text": "A title"}]
    ) as at:
        options = ("--workspace", tmp_path / "project", "--provider", f"{kind}={at.url}")
        trajectory = _run(known, *options, agent, *words)
        agents = Agents(snap, "runc")
        assert agents.names(trajectory) == ["start", call["name"], "exit"]
        assert agents.files(trajectory)["greeting"] == "hello\n"
        assert "installing" not in known("run", "--detach", *options, agent, *words).stderr, "it is installed once"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_aider_edits_from_the_text_of_a_reply(snap: Snap, runc_ready: None, full_image: str, tmp_path: Path) -> None:
    """pip installs it once, and its requests are recorded."""
    (tmp_path / "project").mkdir()
    edit = "greeting\n```\n<<<<<<< SEARCH\n=======\nhello\n>>>>>>> REPLACE\n```\n"
    known = _known(snap)
    with provider(tmp_path, *[{"text": edit}] * 4) as at:
        options = ("--workspace", tmp_path / "project", "--image", full_image, "--provider", f"openai={at.url}")
        trajectory = _run(known, *options, "aider", "--no-git", "--model", "openai/gpt-4o", "--message", "greet")
        agents = Agents(snap, "runc")
        assert agents.files(trajectory)["greeting"] == "hello\n"
        assert agents.names(trajectory) == ["start", "exit"]
        assert [kind for kind, _ in agents.journal(trajectory)] == ["model"]
        role, content = agents.said(trajectory)[-1]
        assert (role, str(content).count("REPLACE")) == ("assistant", 1)


def test_a_profile_of_a_user(snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """A program in a folder of the machine, which is taken in once, and again when it has changed."""
    (tmp_path / "tool").mkdir()
    program = tmp_path / "tool" / "mine"
    program.write_text('#!/bin/sh\necho "$GREETING $1" > /workspace/said\n')
    program.chmod(0o755)
    place = tmp_path / "config" / "snapshotd" / "agents"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(
        f'folder = "{tmp_path / "tool"}"\ncommand = ["{{program}}/mine"]\n[env]\nGREETING = "hello"\n'
    )
    own = _known(snap, XDG_CONFIG_HOME=str(tmp_path / "config"))
    agents = Agents(snap, "runc")
    assert agents.files(_run(own, "mine", "you"))["said"] == "hello you\n"
    assert agents.files(_run(own, "--env", "GREETING=bye", "mine", "you"))["said"] == "bye you\n"
    program.write_text('#!/bin/sh\necho "changed" > /workspace/said\n')
    assert agents.files(_run(own, "mine"))["said"] == "changed\n"


ASKS = """
import json, os, subprocess, sys, urllib.request
said = [{"role": "user", "content": input("your task? ")}]
assert sys.stdin.isatty() and sys.stdout.isatty()
while True:
    body = json.dumps({"model": "m", "messages": said, "tools": []}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})) as answer:
        message = json.load(answer)["choices"][0]["message"]
    said.append(message)
    print(message["content"], flush=True)
    if not message.get("tool_calls"):
        sys.exit(3)
    for call in message["tool_calls"]:
        done = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, cwd="/workspace")
        said.append({"role": "tool", "tool_call_id": call["id"], "content": str(done.returncode)})
"""


def test_a_known_agent_has_the_terminal_and_a_snapshot_for_each_call(
    snap: Snap, runc_ready: None, tmp_path: Path
) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "asks.py").write_text(ASKS)
    place = tmp_path / "config" / "snapshotd" / "agents"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(
        f'folder = "{tmp_path / "tool"}"\ncommand = ["python3", "{{program}}/asks.py"]\nprovider = "openai"\n'
    )
    own = _known(snap, XDG_CONFIG_HOME=str(tmp_path / "config"))
    steps = [bash(f"echo {number} > part{number}", f"Part {number}.") for number in (1, 2)]
    with provider(tmp_path, *steps, {"text": "Done."}) as at:
        words = ("run", "-it", "--runtime", "runc", "--name", "typed", "--provider", f"openai={at.url}", "mine")
        assert "no terminal" in own(*words, code=125).stderr, "standard input is none"
        person = Person(own, *words)
        person.reads("your task? ")
        person.types("do it\r")
        person.reads("Part 1.")
        person.reads("Done.")
        assert person.ends() == 3
    agents = Agents(snap, "runc")
    assert agents.names("typed") == ["start", "bash", "bash", "exec"]
    first, second = (step["id"] for step in agents.steps("typed") if step["tool"]["name"] == "bash")
    assert agents.files(first) == {"part1": "1\n"}
    assert agents.files(second) == {"part1": "1\n", "part2": "2\n"}
    assert agents.said("typed")[0] == ("user", "do it")
    assert [line["status"] for line in snap.json("ls") if line["name"] == "typed"] == ["stopped"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-t", "claude"), "write -it"),
        (("-it", "--detach", "claude"), "leave out -it"),
        (("-it", __file__), "no terminal"),
    ],
)
def test_a_terminal_that_cannot_be_given_is_refused(snap: Snap, words: tuple[str, ...], says: str) -> None:
    assert says in _known(snap)("run", *words, code=125).stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = 3", "another type"),
        ("folder = 'x'", "list of words"),
        ("command = ['x']\nnpm = 'a@1'\nfolder = 'b'", "take the others out"),
        ("command = ['x']\nunknown = 1", "no field"),
        ("command = [", "TOML"),
        ("command = ['x']\nfolder = '/nowhere'", "does not exist"),
    ],
)
def test_a_malformed_profile_is_told(snap: Snap, runc_ready: None, tmp_path: Path, text: str, says: str) -> None:
    place = tmp_path / "snapshotd" / "agents"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(text)
    own = _known(snap, XDG_CONFIG_HOME=str(tmp_path))
    before = len(snap.json("ls"))
    assert says in own("run", "--runtime", "runc", "mine", code=125).stderr
    assert len(snap.json("ls")) == before
