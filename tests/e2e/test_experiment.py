"""Experiments: variants from one state, each several times, scored with hidden tests, under budgets and stop rules."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import Conflict, NotFound, UsageError
from tests.e2e.support import AGENT, Snap, wait_until

PROGRAM = (
    AGENT
    + """
import time, pathlib
way, gate = os.environ.get("WAY", "first"), os.environ.get("GATE")
shell("echo 'answer = lambda n: 0' > /workspace/answer.py")
if way != "first":
    body = {"plus": "n + n", "times": "n * n", "breaks": "n * n"}.get(way, "0")
    shell("echo 'answer = lambda n: %s' > /workspace/answer.py; touch /tmp/outside" % body)
    if way == "breaks":
        shell("rm /workspace/check.py")
    if way.startswith("asks"):
        from snapshotd.agent import model
        count = 10 if way == "asks-much" else 1
        reply = {"text": "yes", "usage": {"input_tokens": 100 * count, "output_tokens": 20 * count}}
        model("test", {"ask": way}, call=lambda: reply)
        shell("true")
    if way == "slow":
        time.sleep(600)
    if way == "many":
        for number in range(40):
            shell("echo %d > n" % number)
while gate and not os.path.exists("/workspace/go"):
    time.sleep(0.05)
"""
)
CHECK = """
import sys
sys.path.insert(0, "/workspace")
from answer import answer
good = sum(answer(n) == n * n for n in range(4))
print(good / 4)
sys.exit(good < 4)
"""


@pytest.fixture(scope="module")
def source(snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The snapshot after the agent's first step."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "check.py").write_text("# the agent's own tests\n")
    snap("run", "--quiet", "--runtime", "runc", "--name", "origin", "--workspace", folder, folder / "agent.py")
    yield next(str(one["id"]) for one in snap.json("log", "origin") if one["tool"]["name"] == "shell")
    snap("rm", "--force", "origin", code=None)


@pytest.fixture
def described(tmp_path: Path, source: str) -> Callable[..., Path]:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "hidden.py").write_text(CHECK)

    def describe(body: str, *, ways: tuple[str, ...] = ("plus", "times"), command: str | None = None) -> Path:
        file = tmp_path / f"{tmp_path.name}.toml"
        score = command or '["python3", "/tmp/score/hidden.py"]'
        variants = "".join(f'[variants.{way}]\nenv.WAY = "{way}"\n' for way in ways)
        file.write_text(
            f'from = "{source}"\nresume = true\n{body}\n[score]\ncommand = {score}\nkind = "number"\nfiles = "hidden"\n'
            f"timeout = 60\n{variants}"
        )
        return file

    return describe


def by_label(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{one['label']}.{one['run']}": one for one in info["branches"]}


@pytest.mark.runc
def test_variants_are_scored_ranked_promoted_and_removed(snap: Snap, described: Callable[..., Path]) -> None:
    file = described('repeat = 2\nparallel = 2\nprotected = ["/workspace/check.py"]', ways=("plus", "breaks", "times"))
    info = snap.json("experiment", "run", file)
    rows = {one["label"]: one for one in info["variants"]}
    assert [(rows[way]["score"], rows[way]["passes"]) for way in ("times", "plus", "breaks")] == [
        (1, 2),
        (0.5, 0),
        (1, 0),
    ]
    assert rows["times"]["pass_at"] == {"1": 1.0, "2": 1.0}
    assert rows["times"]["standard_error"] == 0
    branches = by_label(info)
    times = branches["times.1"]
    assert (times["call_count"], times["file_count"], times["line_count"], times["outside"]) == (1, 1, 2, 1)
    assert branches["breaks.0"]["protected"] == ["/workspace/check.py"]
    assert (info["best"][:6], info["ended_because"]) == ("times.", "all branches have ended")
    name = file.stem
    assert snap.json("experiment", "run", file) == info, "it has ended, so nothing runs again"
    assert snap.json("experiment", "status", name) == info
    assert name in [one["name"] for one in snap.json("experiment", "ls")]
    shown = snap("experiment", "status", name).stdout
    assert "1 ± 0" in shown
    assert "experiment promote" in shown
    assert len(snap("experiment", "status", "--branches", name).stdout.splitlines()) == 1 + 6 + 2
    compared = snap.json("experiment", "compare", name)
    assert len(compared["pairs"]) == 2
    assert "leaves them behind" in snap("experiment", "promote", name, code=Conflict.exit_code).stderr
    taken = snap.json("experiment", "promote", "--yes", name)
    assert taken["tool"]["name"] == "promote"
    assert "n * n" in snap("cat", "origin:/workspace/answer.py").stdout
    snap("undo", "origin")
    snap("experiment", "promote", "--wait", "stored", "--yes", name, "plus.0")
    assert "n + n" in snap("cat", "origin:/workspace/answer.py").stdout
    snap("experiment", "rm", name)
    assert snap("experiment", "status", name, code=NotFound.exit_code).stderr.count("no experiment") == 1
    assert not [one for one in snap.json("ls") if (one["name"] or "").startswith(f"{name}.")]


@pytest.mark.long  # a branch with an error: test_tokens_and_their_cost_are_counted_and_limited
@pytest.mark.runc
def test_errors_of_branches_are_not_those_of_the_experiment(snap: Snap, described: Callable[..., Path]) -> None:
    file = described("parallel = 3\n[budget]\ncalls = 20", ways=("plus", "many", "times"))
    branches = by_label(snap.json("experiment", "run", file))
    assert "budget of 20 calls" in branches["many.0"]["error"]
    assert [branches[f"{way}.0"]["status"] for way in ("plus", "times")] == ["scored", "scored"]
    snap("experiment", "rm", file.stem)
    file = described("[budget]\nseconds = 3", ways=("slow",))
    (branch,) = snap.json("experiment", "run", file, code=1)["branches"]
    assert "budget of 3 seconds" in branch["error"]
    assert (branch["status"], branch["score"], branch["passed"]) == ("failed", None, False)
    snap("experiment", "rm", file.stem)


@pytest.mark.runc
def test_tokens_and_their_cost_are_counted_and_limited(snap: Snap, described: Callable[..., Path]) -> None:
    prices = "[prices]\ninput = 1000\noutput = 5000\n"
    file = described(prices + "[budget]\ntokens = 500", ways=("asks", "asks-much"))
    branches = by_label(snap.json("experiment", "run", file, code=1))
    assert (branches["asks.0"]["tokens"], branches["asks.0"]["cost"]) == ([100, 20], 0.2)
    assert branches["asks.0"]["status"] == "scored"
    assert "budget of 500 tokens" in branches["asks-much.0"]["error"]
    snap("experiment", "rm", file.stem)
    file = described(prices + "[stop]\ncost = 0.1\n[budget]\ncost = 50", ways=("asks", "plus", "times"))
    file.write_text("parallel = 1\n" + file.read_text())
    info = snap.json("experiment", "run", file, code=1)
    assert info["ended_because"] == "more than 0.1 of cost were used"
    first, *others = (one["status"] for one in info["branches"])
    assert first in ("scored", "stopped"), "the cost is looked at while it runs: it may have ended by then, or not"
    assert others == ["skipped", "skipped"]
    snap("experiment", "rm", file.stem)


@pytest.mark.runc
def test_a_terminal_shows_the_table_while_it_runs(snap: Snap, described: Callable[..., Path]) -> None:
    file = described("parallel = 1")
    words = [sys.executable, "-m", "snapshotd", "experiment", "run", str(file)]
    shown = subprocess.run(
        ["script", "-qec", shlex.join(words), "/dev/null"], env=snap.env, capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown.stdout
    moving, _, last = shown.stdout.rpartition("RANK")
    assert "0/1" in moving
    assert "1/1" in last
    assert "best: times.0" in last
    snap("experiment", "rm", file.stem)


@pytest.mark.long  # what is no number: unit/engine/test_scoring.py
@pytest.mark.runc
def test_a_score_that_never_ends_or_prints_no_number(snap: Snap, described: Callable[..., Path]) -> None:
    script = "grep -q 'n + n' /workspace/answer.py && sleep 600; echo none"
    file = described("", command=f'["sh", "-c", "{script}"]')
    file.write_text(file.read_text().replace("timeout = 60", "timeout = 4"))
    info = snap.json("experiment", "run", file, code=1)
    branches = by_label(info)
    assert "did not end within" in branches["plus.0"]["error"]
    assert "no line of the command's output is a number" in branches["times.0"]["error"]
    snap("experiment", "rm", file.stem)


@pytest.mark.runc
def test_the_first_that_passes_ends_it(snap: Snap, described: Callable[..., Path]) -> None:
    file = described("parallel = 2\n[stop]\nfirst_pass = true", ways=("slow", "times", "plus"))
    info = snap.json("experiment", "run", file)
    branches = by_label(info)
    assert info["ended_because"] == "times.0 passed"
    assert branches["slow.0"]["status"] == "stopped"
    assert info["best"] == "times.0"
    snap("experiment", "rm", "--force", file.stem)


@pytest.mark.runc
def test_one_that_is_stopped_goes_on_when_it_is_run_again(snap: Snap, described: Callable[..., Path]) -> None:
    file = described("parallel = 1", ways=("slow", "times"))
    file.write_text(file.read_text().replace('WAY = "slow"', 'WAY = "times"\nenv.GATE = "yes"'))
    command = snap.follow("experiment", "run", file)
    name = file.stem
    wait_until(lambda: name in snap("experiment", "ls").stdout, "it has begun")
    wait_until(lambda: by_label(snap.json("experiment", "status", name))["slow.0"]["status"] == "running", "one runs")
    assert "stop it first" in snap("experiment", "rm", name, code=Conflict.exit_code).stderr
    stopped = by_label(snap.json("experiment", "stop", name))
    assert [stopped[f"{way}.0"]["status"] for way in ("slow", "times")] == ["stopped", "skipped"]
    _, err = command.communicate(timeout=60)
    assert command.returncode == 1, err
    assert snap.json("experiment", "status", name)["ended_because"] == "it was stopped"
    command = snap.follow("experiment", "run", file)
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    wait_until(lambda: client.trajectory(f"{name}.slow.0").status == "running", "it goes on")
    wait_until(
        lambda: snap("exec", f"{name}.slow.0", "--", "touch", "/workspace/go", code=None).returncode == 0, "replayed"
    )
    _, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert {one["score"] for one in snap.json("experiment", "status", name)["branches"]} == {1}
    snap("experiment", "rm", name)


@pytest.mark.runc
def test_ctrl_c_stops_it_and_one_that_is_detached_runs_on(snap: Snap, described: Callable[..., Path]) -> None:
    file = described("", ways=("slow",))
    name = file.stem
    command = snap.follow("experiment", "run", file)
    wait_until(lambda: name in snap("experiment", "ls").stdout, "it has begun")
    wait_until(lambda: by_label(snap.json("experiment", "status", name))["slow.0"]["status"] == "running", "it runs")
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    info = snap.json("experiment", "status", name)
    assert (info["ended_because"], info["branches"][0]["status"]) == ("it was stopped", "stopped")
    assert snap("experiment", "run", "--detach", file).stdout == f"{name}\n"
    wait_until(lambda: by_label(snap.json("experiment", "status", name))["slow.0"]["status"] == "running", "it goes on")
    assert snap.json("experiment", "status", name)["ended_because"] is None
    snap("experiment", "rm", "--force", name)


POINTS = ("engine.experiment.forked", "engine.experiment.scored")


@pytest.mark.long  # one that dies while branches run: two tests below
@pytest.mark.runc
@pytest.mark.parametrize("point", POINTS)
def test_a_daemon_that_dies_in_the_middle_makes_no_branch_twice(own_snap: Snap, tmp_path: Path, point: str) -> None:
    """Between fork and record, or between score and record, of the second branch; the next daemon goes on by itself."""
    snap, file = own_snap, lasting(tmp_path, "times", "plus", "zero")
    file.write_text(file.read_text().replace("parallel = 2", "parallel = 1").replace(', GATE = "yes"', ""))
    snap.stop_daemon()
    Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": f"{point}:2"})("ls")
    died = snap.daemon_pid()
    command = snap.follow("experiment", "run", "--json", file)
    out, err = command.communicate(timeout=180)
    assert command.returncode == 0, err
    assert f"failpoint {point}" in (snap.state_dir / "daemon.log").read_text()
    assert snap.daemon_pid() != died
    branches = by_label(json.loads(out))
    assert {name: (one["status"], one["score"]) for name, one in branches.items()} == {
        "times.0": ("scored", 1.0),
        "plus.0": ("scored", 0.0),
        "zero.0": ("scored", 0.0),
    }
    made = {one["id"]: one["name"] for one in snap.json("ls")}
    assert sorted(made.values()) == ["lasting.base", "lasting.plus.0", "lasting.times.0", "lasting.zero.0"]
    assert {one["trajectory"] for one in branches.values()} <= made.keys()
    snap("fork", "--name", "child", "lasting.times.0")
    refused = snap("experiment", "rm", "--force", "lasting", code=Conflict.exit_code)
    assert "cannot be removed" in refused.stderr
    assert {one["id"] for one in snap.json("ls")} > made.keys(), "nothing is removed when it is refused"
    snap("rm", "--force", "child")
    snap("experiment", "rm", "lasting")
    assert snap.json("ls") == []


@pytest.mark.runc
def test_a_secret_of_a_variant_is_nowhere_in_plain(own_snap: Snap, tmp_path: Path) -> None:
    secret = "a-secret-that-only-the-branch-knows"
    file = lasting(tmp_path, "times")
    file.write_text(
        file.read_text().replace("parallel = 2", 'parallel = 1\nname = "kept"').replace(', GATE = "yes"}', "}")
        + 'secrets.TOKEN = "OWN_TOKEN"\n'
    )
    (tmp_path / "agent.py").write_text(
        PROGRAM + "\nimport hashlib\nprint(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest())\n"
    )
    snap = Snap(own_snap.state_dir, {**own_snap.env, "OWN_TOKEN": secret})
    snap("experiment", "run", file)
    assert hashlib.sha256(secret.encode()).hexdigest() in snap("logs", "kept.times.0").stdout
    recorded = [*snap.state_dir.glob("*.db*"), *snap.state_dir.rglob("*.ndjson")]
    assert snap.state_dir / "catalog.db" in recorded
    assert [path for path in recorded if secret.encode() in path.read_bytes()] == []
    snap("experiment", "rm", "kept")


def lasting(folder: Path, *ways: str) -> Path:
    """An experiment in a new sandbox whose branches end when the file `go` is there."""
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "hidden").mkdir()
    (folder / "hidden" / "hidden.py").write_text(CHECK)
    file = folder / "lasting.toml"
    file.write_text(
        'parallel = 2\nprogram = ["python3", "agent.py"]\n[from]\nworkspace = "."\nruntime = "runc"\n'
        '[score]\ncommand = ["python3", "/tmp/score/hidden.py"]\nfiles = "hidden"\n'
        + "".join(f'[variants.{way}]\nenv = {{WAY = "{way}", GATE = "yes"}}\n' for way in ways)
    )
    return file


@pytest.mark.runc
def test_an_experiment_goes_on_after_its_command_and_its_daemon_died(own_snap: Snap, tmp_path: Path) -> None:
    """Both are killed while two branches run and one waits. The next daemon goes on by itself, none runs twice, and
    another process sees it live."""
    snap, file = own_snap, lasting(tmp_path, "times", "plus", "zero")
    command = snap.follow("experiment", "run", file)
    client = Snapshotd(state_dir=snap.state_dir)

    def running() -> list[str]:
        return [one.trajectory.name or "" for one in client.sandboxes() if one.agent_running]

    wait_until(lambda: len(running()) == 2, "two branches run")
    wait_until(lambda: all(len(client.log(name)) >= 2 for name in running()), "both took their steps")
    first = running()
    command.send_signal(signal.SIGKILL)
    command.communicate()
    snap.kill_daemon()
    snap("ls")
    wait_until(lambda: sorted(running()) == sorted(first), "the branches go on")
    command = snap.follow("experiment", "status", "--follow", "--json", "lasting")
    for name in ("lasting.times.0", "lasting.plus.0", "lasting.zero.0"):
        wait_until(lambda name=name: name in running(), f"{name} runs")  # type: ignore[misc]
        client.exec(name, ["touch", "/workspace/go"])
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert '"ended_because": "all branches have ended"' in out
    assert snap.json("experiment", "run", file) == json.loads(out), "it has ended, so nothing runs again"
    info = snap.json("experiment", "status", "lasting")
    assert {name: one["score"] for name, one in by_label(info).items()} == {"times.0": 1, "plus.0": 0, "zero.0": 0}
    assert {one["name"] for one in snap.json("ls")} == {"lasting.base", *(f"lasting.{name}" for name in by_label(info))}
    snap("experiment", "rm", "lasting")
    assert snap.json("ls") == []


@pytest.mark.long  # with the daemon alone: the test before
@pytest.mark.runc
def test_branches_that_died_with_the_machine_are_resumed(own_snap: Snap, tmp_path: Path) -> None:
    snap, file = own_snap, lasting(tmp_path, "times")
    command, client = snap.follow("experiment", "run", file), Snapshotd(state_dir=snap.state_dir)
    name = "lasting.times.0"
    wait_until(lambda: name in [one.trajectory.name for one in client.sandboxes()], "it runs")
    wait_until(lambda: len(client.log(name)) >= 2, "it took its steps")
    steps = [one.id for one in client.log(name)]
    command.send_signal(signal.SIGKILL)
    command.communicate()
    snap.crash()
    command = snap.follow("experiment", "status", "--follow", "lasting")
    wait_until(lambda: client.trajectory(name).status == "running", "it is resumed")
    wait_until(
        lambda: snap("exec", name, "--", "touch", "/workspace/go", code=None).returncode == 0, "it is live again"
    )
    _, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert [one.id for one in client.log(name)][: len(steps)] == steps, "no step was taken again"
    (branch,) = snap.json("experiment", "status", "lasting")["branches"]
    assert (branch["status"], branch["score"]) == ("scored", 1.0)
    snap("experiment", "rm", "lasting")


@pytest.mark.runc
def test_a_branch_begins_with_what_its_variant_changes(
    snap: Snap, described: Callable[..., Path], tmp_path: Path
) -> None:
    """The keys of a variants file, in an experiment; files begin at its folder."""
    (tmp_path / "given.txt").write_text("given\n")
    file = described("", ways=("plus", "times"))
    more = 'files = { "given" = "given.txt" }\nstate.hint = [1]\npids = 90\n'
    file.write_text(file.read_text() + more)  # of the last table, which is that of `times`
    info = snap.json("experiment", "run", file)
    name = f"{tmp_path.name}.times.0"
    assert {one["label"]: one["status"] for one in info["branches"]} == {"plus": "scored", "times": "scored"}
    assert snap("cat", f"{name}:given").stdout == "given\n"
    assert snap.json("state", name)["hint"] == [1]
    assert next(one for one in snap.json("ls") if one["name"] == name)["limits"]["pids"] == 90
    snap("cat", f"{tmp_path.name}.plus.0:given", code=4)
    snap("experiment", "rm", tmp_path.name)


@pytest.mark.runc
def test_what_is_wrong_in_a_file_is_said_with_its_line(
    snap: Snap, described: Callable[..., Path], tmp_path: Path
) -> None:
    before = snap.json("ls")
    good = described("parallel = 2").read_text()
    for old, new, said in (
        ("parallel = 2", "paralel = 2", ":3: there is no key 'paralel'; did you mean 'parallel'?"),
        ("parallel = 2", "parallel = 0", ":3: parallel is not a whole number"),
        ('env.WAY = "plus"', 'evn.WAY = "plus"', ":10: there is no key 'evn' of variants.plus; did you mean 'env'?"),
        (
            'env.WAY = "plus"',
            'env.WAY = "plus"\nfiles.x = "absent"',
            "absent, for x in the variant plus, cannot be read",
        ),
        ('kind = "number"', 'kind = "junit"', "report"),
        ('kind = "number"', 'kind = "marks"', ":6: kind of score is not one of exit, number, junit"),
        ("resume = true", "", "nothing to run"),
        ("[score]", "[budget]\ncost = 3\n[score]", "needs [prices]"),
        ("variants.plus", "variants.'p/q'", "is no name"),
        ('files = "hidden"', 'files = "absent"', "is no folder"),
        ("from = ", "from = 1 #", "a snapshot or a table"),
        ("command = [", "command = [[", "no TOML"),
    ):
        assert old in good
        file = tmp_path / f"wrong-{abs(hash(new))}.toml"
        file.write_text(good.replace(old, new, 1))
        assert said in snap("experiment", "run", file, code=UsageError.exit_code).stderr, (new, said)
    assert snap.json("ls") == before
    assert "wrong-" not in snap("experiment", "ls").stdout
    assert "cannot be read" in snap("experiment", "run", tmp_path / "absent.toml", code=UsageError.exit_code).stderr


@pytest.mark.long  # bad descriptions: unit/daemon/test_branching_api.py
@pytest.mark.runc
def test_another_description_of_the_same_name_is_refused(
    snap: Snap, described: Callable[..., Path], tmp_path: Path
) -> None:
    file = described("")
    snap("experiment", "run", file)
    file.write_text(file.read_text() + "# a comment is no part of it\n")
    snap("experiment", "run", file)
    (tmp_path / "hidden" / "more.py").write_text("")
    assert "another description" in snap("experiment", "run", file, code=Conflict.exit_code).stderr
    snap("experiment", "rm", file.stem)
    snap("experiment", "run", file)
    snap("experiment", "rm", file.stem)
