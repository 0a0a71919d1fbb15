"""The command `mini` of mini-swe-agent with a scripted model, in sandboxes of ours, and their answers beside those of its own
environment."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotd.errors import NotFound
from tests.e2e.plug_rig import ROOT, check_page, packages
from tests.e2e.support import Snap, processes_with, wait_until

PINS = ("mini-swe-agent==2.4.6",)
PROGRAMS = Path(__file__).with_name("programs")
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return packages("minisweagent", *PINS)


def environment(folder: Path, snap: Snap, place: Path) -> dict[str, str]:
    own = {"HOME": str(place), "MSWEA_GLOBAL_CONFIG_DIR": str(place), "MSWEA_CONFIGURED": "1"}
    return {**snap.env, **own, "MSWEA_SILENT_STARTUP": "1", "PYTHONPATH": f"{folder}:{ROOT}:{PROGRAMS}"}


def mini(folder: Path, snap: Snap, place: Path, *words: object, kill: str = "", code: int = 0) -> str:
    """Run the command as its page says, but with a model and an environment of the test's own."""
    done = begun(folder, snap, place, *words, kill=kill)
    said = "".join(done.communicate(timeout=120))
    assert done.returncode == code, said
    return said


def begun(folder: Path, snap: Snap, place: Path, *words: object, kill: str = "") -> subprocess.Popen[str]:
    plug = "snapshotd.integrations.mini_swe_agent"
    chosen = ("--environment-class", "mini_parts.Doomed", "--agent-class", f"{plug}.SnapshotdInteractiveAgent")
    fixed = (
        "-t",
        "please",
        "-y",
        "--exit-immediately",
        "--cost-limit",
        "0",
        "--output",
        "run.traj.json",
        "--model",
        "scripted",
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "minisweagent.run.mini",
            *fixed,
            *chosen,
            "--model-class",
            "mini_parts.Scripted",
            "-c",
            "mini.yaml",
            *map(str, words),
        ],
        env={**environment(folder, snap, place), "SNAPSHOTD_TEST_KILL": kill},
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def observations(place: Path) -> list[dict[str, Any]]:
    """What the saved trajectory says of each call that was answered."""
    messages = json.loads((place / "run.traj.json").read_text())["messages"]
    return [one["extra"] for one in messages if one.get("extra", {}).get("snapshot")]


def log_at(snap: Snap, snapshot: str) -> str:
    return " ".join(snap("cat", f"{snapshot}:/workspace/log").stdout.split())


def submission(place: Path) -> str:
    return " ".join(json.loads((place / "run.traj.json").read_text())["info"]["submission"].split())


def test_each_message_names_the_snapshot_of_its_call(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    mini(folder, plugged, tmp_path)
    told = observations(tmp_path)
    assert [one.get("raw_output") for one in told] == ["1\n", "2\n", "3\n", "4\n", None]
    assert [log_at(plugged, one["snapshot"]) for one in told] == ["1", "1 2", "1 2 3", "1 2 3 4", "1 2 3 4"]
    assert submission(tmp_path) == "1 2 3 4"
    (box,) = plugged.json("ls")
    assert (box["status"], {one["trajectory"] for one in told}) == ("stopped", {box["id"]})
    made = [step["id"] for step in plugged.json("log", box["id"]) if step["tool"]["name"] == "exec"]
    assert made == [one["snapshot"] for one in told], "one snapshot for each call"


def test_it_goes_back_to_the_middle_in_a_fork(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    mini(folder, plugged, tmp_path)
    first = observations(tmp_path)
    again = "-c", f"agent.resume_at={first[1]['snapshot'][:10]}"
    mini(folder, plugged, tmp_path, "-c", "agent.resume=run.traj.json", *again)
    told = observations(tmp_path)
    assert [one["snapshot"] for one in told[:2]] == [one["snapshot"] for one in first[:2]]
    assert {one["trajectory"] for one in told[2:]}.isdisjoint({one["trajectory"] for one in first})
    assert (submission(tmp_path), log_at(plugged, first[-1]["snapshot"])) == ("1 2 3 4", "1 2 3 4")
    saved = json.loads((tmp_path / "run.traj.json").read_text())
    assert saved["info"]["model_stats"] == {"instance_cost": 5.0, "api_calls": 5}
    assert sum(one.get("role") == "system" for one in saved["messages"]) == 1


@pytest.mark.parametrize("point", ["before 3", "after 3"])
def test_a_killed_agent_goes_on(folder: Path, plugged: Snap, tmp_path: Path, point: str) -> None:
    mini(folder, plugged, tmp_path, kill=point, code=-signal.SIGKILL)
    assert len(observations(tmp_path)) == 2
    mini(folder, plugged, tmp_path, "-c", "agent.resume=run.traj.json")
    assert (submission(tmp_path), len(observations(tmp_path))) == ("1 2 3 4", 5)


def test_a_daemon_that_dies_within_a_call_ends_the_run_and_it_goes_on(
    folder: Path, plugged: Snap, tmp_path: Path
) -> None:
    running = begun(folder, plugged, tmp_path, kill="slow 3")
    sleeps = "sleep 6061"
    wait_until(lambda: sleeps in [line.strip() for _, line in processes_with(sleeps)], "the third command has written")
    plugged.kill_daemon()
    said = "".join(running.communicate(timeout=120))
    assert running.returncode == 1, said
    saved = json.loads((tmp_path / "run.traj.json").read_text())
    assert saved["info"]["exit_status"] in ("AnswerLost", "DaemonUnavailable")
    assert len(observations(tmp_path)) == 2, "nothing of the call is in the trajectory"
    mini(folder, plugged, tmp_path, "-c", "agent.resume=run.traj.json")
    assert (submission(tmp_path), len(observations(tmp_path))) == ("1 2 3 4", 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-c", "environment.snapshot=nosuch"), "nosuch"),
        (("-c", "environment.image=no-such-image"), "no-such-image"),
        (("-c", "agent.resume=nosuch.json"), "No such file"),
    ],
)
def test_what_cannot_be_ends_the_run_before_the_model_is_asked(
    folder: Path, plugged: Snap, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in mini(folder, plugged, tmp_path, *words, code=1)
    assert plugged.json("ls") == []


def test_a_call_that_is_not_there_is_no_place_to_go_on_from(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    mini(folder, plugged, tmp_path)
    whole = (tmp_path / "run.traj.json").read_text()
    wrong = "-c", "agent.resume=run.traj.json", "-c", "agent.resume_at=xyz"
    assert "no call has a snapshot that begins with 'xyz'" in mini(folder, plugged, tmp_path, *wrong, code=1)
    assert (tmp_path / "run.traj.json").read_text() == whole
    assert len(plugged.json("ls")) == 1


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("echo out; echo err >&2; echo again", {}),
        ("echo $TEST_VAR; exit 42", {}),
        ("printf '\\377\\n'; pwd", {"cwd": "/tmp"}),
        ("echo before; sleep 60", {"timeout": 1}),
        ("no-such-program", {}),
        ("true", {"cwd": "/nosuch"}),
        ("read line; echo $line", {}),
    ],
)
def test_an_action_answers_as_in_upstreams_own_environment(
    folder: Path, plugged: Snap, command: str, more: dict[str, Any]
) -> None:
    from minisweagent.environments.local import LocalEnvironment

    from snapshotd.integrations.mini_swe_agent import MiniEnvironment

    answers = []
    for kind in (LocalEnvironment, MiniEnvironment):
        found = kind(env={"TEST_VAR": "value"}, cwd="/").execute({"command": command}, **more)
        found["extra"] = {key: value for key, value in found.get("extra", {}).items() if key == "exception"}
        answers.append(found)
    theirs, ours = answers
    assert bool(theirs["exception_info"]) == bool(ours["exception_info"])
    assert ours["exception_info"].startswith("An error occurred while executing the command: ") == bool(ours["extra"])
    said = [re.sub(r".*: (\S+: )?((command )?not found)", "not found", one["output"]) for one in answers]
    assert (said[0], theirs["returncode"]) == (said[1], ours["returncode"])


def test_a_sandbox_that_is_gone_ends_the_run(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    from minisweagent.models.test_models import DeterministicModel, make_output

    from snapshotd.integrations.mini_swe_agent import MiniEnvironment, SnapshotdAgent

    class Removing(MiniEnvironment):
        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            if action["command"] == "remove":
                self.box.remove(force=True)
                action = {"command": "true"}
            return super().execute(action, cwd, timeout=timeout)

    model = DeterministicModel(
        outputs=[make_output("", [{"command": "echo 1 > log"}]), make_output("", [{"command": "remove"}])]
    )
    saved = tmp_path / "run.traj.json"
    agent = SnapshotdAgent(model, Removing(), system_template="s", instance_template="i", output_path=saved)
    with pytest.raises(NotFound):
        agent.run("please")
    assert json.loads(saved.read_text())["info"]["exit_status"] == "NotFound"


def test_the_programs_of_the_page(folder: Path, plugged: Snap, tmp_path: Path) -> None:
    env = environment(folder, plugged, tmp_path)
    check_page("mini-swe-agent.md", plugged, tmp_path, env)
