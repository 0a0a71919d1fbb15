"""Forks whose children differ in files, mind, secrets, model, network and limits: the examples of docs/branching.md, on
each kind of source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from tests.e2e.model_rig import PROGRAMS, Agents, bash, provider
from tests.e2e.support import AGENT, Snap, daemon_with, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "branching.md"
SECRET = "a-token-that-only-one-child-has-0123456789"
PROGRAM = (
    AGENT
    + """
from snapshotd.agent import state

@tool
def count():
    return {"lines": 3}

message("user", "go")
message("user", "repair it")
state["plan"] = ["look", "repair"]
found = count()
shell(f"echo {found['lines']} {os.environ.get('API_TOKEN', 'none')} > out")
"""
)


@dataclass(frozen=True)
class Source:
    """A finished run, the snapshot of its call `count`, and a folder with the files that the page's example names."""

    trajectory: str
    counted: str
    folder: Path


@pytest.fixture
def source(snap: Snap, runtime: str, tmp_path: Path) -> Iterator[Source]:
    (tmp_path / "agent.py").write_text(PROGRAM)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("app.py", "old.py"):
        (work / name).write_text("as it was\n")
    (tmp_path / "fixed.py").write_text("fixed\n")
    (tmp_path / "motd.txt").write_text("hello\n")
    (tmp_path / "ways.toml").write_text(_example())
    snap("run", "--runtime", runtime, "--workspace", work, tmp_path / "agent.py")
    trajectory = snap.json("ls")[-1]["id"]
    counted = next(step["id"] for step in snap.json("log", trajectory) if step["tool"]["name"] == "count")
    yield Source(trajectory, counted, tmp_path)
    snap("rm", "--force", trajectory)


def _example() -> str:
    """The table of variants on the page that has all keys but those of the first example."""
    (block,) = [block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "[hint]" in block]
    return str(block)


def _with_secret(snap: Snap) -> Snap:
    return Snap(snap.state_dir, {**snap.env, "SECOND_TOKEN": SECRET})


def test_the_page_s_variants_are_what_their_children_begin_with(snap: Snap, source: Source) -> None:
    before = snap.json("ls")
    assert "SECOND_TOKEN" in snap("fork", source.counted, "--variants", source.folder / "ways.toml", code=2).stderr
    assert snap.json("ls") == before
    snap = _with_secret(snap)
    made = snap.json("fork", "--resume", source.counted, "--variants", source.folder / "ways.toml")
    forks = dict(zip(made["variants"], made["trajectories"], strict=True))
    assert list(forks) == ["hint", "changed", "retold", "other-answer", "patched", "other-token", "small", "reaching"]
    for fork in forks.values():
        snap("attach", fork)

    def said(label: str) -> list[str]:
        return [message["content"] for message in snap.json("show", "--conversation", forks[label])]

    def out(label: str) -> str:
        return snap("cat", f"{forks[label]}:out").stdout

    assert said("hint") == ["go", "repair it", "the log has the reason"]
    assert snap.json("state", forks["hint"]) == {"attempts": 0}
    assert said("changed") == ["go", "repair the other one"]
    assert said("retold") == ["repair both"]
    assert said("small") == ["go", "repair it"]
    assert out("other-answer") == "0 none\n"
    assert out("hint") == "3 none\n"
    assert snap("cat", f"{forks['patched']}:app.py").stdout == "fixed\n"
    assert snap("cat", f"{forks['patched']}:/etc/motd").stdout == "hello\n"
    snap("cat", f"{forks['patched']}:old.py", code=4)
    assert snap("cat", f"{forks['small']}:app.py").stdout == "as it was\n"
    assert SECRET in out("other-token"), "the program had the value"
    for words in (("show", "--json"), ("log", "--json"), ("journal", "--json")):
        assert SECRET not in snap(*words, forks["other-token"]).stdout
    infos = {each["id"]: each for each in snap.json("ls")}
    assert infos[forks["reaching"]]["network"] == "bridge"
    assert {infos[fork]["network"] for label, fork in forks.items() if label != "reaching"} == {"none"}
    limits = infos[forks["small"]]["limits"]
    assert (limits["memory_bytes"], limits["cpus"], limits["pids"], limits["disk_bytes"]) == (
        256 << 20,
        0.5,
        100,
        1 << 30,
    )
    assert infos[forks["hint"]]["limits"] == infos[source.trajectory]["limits"]
    assert snap.sh(forks["small"], "cat /sys/fs/cgroup/pids.max 2>/dev/null || echo 100")["stdout"] == "100\n"
    changed = {label for label, fork in forks.items() if snap.json("log", fork)[0]["tool"]["name"] == "edit"}
    assert changed == {"hint", "changed", "retold", "other-answer", "patched"}
    for fork in forks.values():
        snap("rm", "--force", fork)


@pytest.mark.long  # how options are read: unit/cli
def test_options_say_the_same_as_the_file(snap: Snap, source: Source) -> None:
    words = [
        "hint:message.user=the log",
        "hint:state.attempts=[0, null]",
        "hint:state.plan=null",
        'other-answer:result={"lines": 7}',
        f"patched:files.app.py={source.folder}/fixed.py",
        "patched:remove=old.py",
        "told:messages=[]",
        "told:args=--way {variant}-{index}",
        "small:pids=90",
    ]
    made = snap.json("fork", "--resume", source.counted, *(each for word in words for each in ("--variant", word)))
    forks = dict(zip(made["variants"], made["trajectories"], strict=True))
    for fork in forks.values():
        snap("attach", fork)
    assert snap.json("state", forks["hint"]) == {"attempts": [0, None]}
    assert snap("cat", f"{forks['other-answer']}:out").stdout == "7 none\n"
    assert snap("cat", f"{forks['patched']}:app.py").stdout == "fixed\n"
    assert snap.json("show", "--conversation", forks["told"]) == []
    assert snap.json("log", forks["told"])[-1]["tool"]["arguments"]["argv"][-2:] == ["--way", "told-3"]
    assert {each["id"]: each for each in snap.json("ls")}[forks["small"]]["limits"]["pids"] == 90
    for fork in forks.values():
        snap("rm", "--force", fork)


@pytest.mark.long  # by the command line: the first test
def test_the_client_takes_the_keywords_of_edit_and_create(snap: Snap, source: Source) -> None:
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    forked = client.fork(
        source.counted,
        resume=True,
        variants={
            "mind": {"drop_messages": 1, "add_messages": [("user", "{variant}")], "result": {"lines": None}},
            "files": {
                "files": {"/workspace/app.py": b"\0\xff", "/workspace/old.py": None},
                "secrets": {"API_TOKEN": SECRET},
            },
            "limits": {"memory": "300m", "network": "none"},
        },
    )
    mind, files, limits = forked.trajectories
    for each in forked.trajectories:
        for _ in client.events(each.id):
            pass
    assert [message.content for message in client.conversation(mind.id)] == ["go", "{variant}"], (
        "only in names, arguments, environment"
    )
    assert snap("cat", f"{mind.id}:out").stdout == "None none\n"
    assert snap("cat", f"{files.id}:app.py").stdout.encode("utf-8", "surrogateescape") == b"\0\xff"
    assert client.trajectory(limits.id).limits.memory_bytes == 300 << 20
    for each in forked.trajectories:
        client.remove(each.id, force=True)


def test_a_child_s_secret_in_its_arguments_is_recorded_nowhere(snap: Snap) -> None:
    base, _ = snap.create()
    own = "xK7-a-value-of-this-child-alone"
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    variant = {"secrets": {"API_TOKEN": own}, "args": ["sh", "-c", f"echo {own} | wc -c > told"]}
    (child,) = client.fork(base, variants={"a": variant}).trajectories
    assert client.wait(child.id).exit_code == 0
    assert client.trajectory(child.id).agent is not None
    assert snap("cat", f"{child.id}:told").stdout == f"{len(own) + 1}\n", "the program has it"
    client.flush()
    for told in (snap("ls", "--json").stdout, snap("log", "--json", child.id).stdout, snap("logs", child.id).stdout):
        assert own not in told
    outside = [path for path in snap.state_dir.rglob("*") if path.is_file() and "layers" not in str(path)]
    assert [path for path in outside if own.encode() in path.read_bytes()] == []
    for each in (child.id, base):
        client.remove(each, force=True)


@pytest.mark.long  # other changes: the first test
@pytest.mark.runc
def test_a_child_s_gateway_asks_for_its_own_model(snap: Snap, tmp_path: Path) -> None:
    """What is recorded is answered from the record; another resume asks for that model, too."""
    steps = [bash("echo one > one"), bash("echo two > two"), {"text": "done"}]
    with provider(
        tmp_path, *steps, models={"small-model": [bash("x"), bash("echo small > two"), {"text": "less"}]}
    ) as at:
        agents = Agents(snap, "runc")
        trajectory = agents.run(at, PROGRAMS / "plain_agent.py", "repair it")
        first = agents.steps(trajectory)[1]["id"]
        at.forget()
        ways = ("--variant", "same", "--variant", "small:model=small-model")
        same, small = snap.json("fork", "--resume", first, *ways)["trajectories"]
        for fork in (same, small):
            snap("attach", fork)
        assert snap("cat", f"{same}:two").stdout == "two\n"
        assert snap("cat", f"{small}:two").stdout == "small\n"
        models = [entry for entry in snap.json("journal", small) if entry["kind"] == "model"]
        assert [entry["name"] for entry in models] == ["gpt-5"] * 3
        assert [entry["details"].get("sent_as") for entry in models] == [None, "small-model", "small-model"]
        assert "small-model" not in snap.sh(small, "env")["stdout"]
    for each in (same, small, trajectory):
        snap("rm", "--force", each)


@pytest.mark.runc
def test_a_change_that_cannot_be_made_leaves_no_child(snap: Snap, tmp_path: Path) -> None:
    trajectory, snapshot = snap.create("--runtime", "runc")
    before = snap.json("ls")
    ways = tmp_path / "ways.toml"
    ways.write_text('[a]\nenv.X = "1"\n[b]\nmesage.user = "x"\n')
    for words, said in (
        (("--variants", str(ways)), f"{ways}:4: the variant b has an unknown key 'mesage'; did you mean 'message'?"),
        (("--variant", "a:modle=x"), "unknown key 'modle'; did you mean 'model'?"),
        (("--variant", "a:env=x"), "unknown key 'env'"),
        (("--variant", "a:pids=many"), "pids='many' of the variant a is not a whole number"),
        (("--variant", "a:network=host"), "host is no network of a sandbox"),
        (("--variant", "a:result={"), "result='{' of the variant a is not JSON"),
        (("--variant", "a:files.x=/no/such/file"), "/no/such/file"),
        (("--variant", "a:drop_messages=1"), "cannot leave out 1 message"),
        (("--variant", "a:result=1"), "has no result that could be edited"),
        (("--variant", "a:model=small"), "no gateway"),
        (("--variant", "a:drop_messages=0", "--variant", "a:messages=[]"), "nothing to drop"),
        (("--variant", "a:memory=1k"), "memory"),
    ):
        failed = snap("fork", snapshot, "--variant", "same", *words, code=None)
        assert failed.returncode == 2, (words, failed.stderr)
        assert said in failed.stderr
    missing = ("--variant", "first:files.x=/etc/hostname", "--variant", "last:remove=none")
    assert "does not exist" in snap("fork", snapshot, *missing, code=4).stderr, "found out when the first was changed"
    assert snap.json("ls") == before
    done = snap.json("fork", snapshot, *missing, "--keep-going", "--", "true", code=1)["children"]
    assert [one["exit_code"] for one in done] == [0, None]
    assert "does not exist" in done[1]["error"]
    assert snap("cat", f"{done[0]['trajectory']}:x").stdout == Path("/etc/hostname").read_text()
    snap("rm", "--force", done[0]["trajectory"])
    snap("rm", "--force", trajectory)


@pytest.mark.long  # such forks: e2e/test_storage.py and test_share.py
@pytest.mark.runc
def test_the_source_may_be_running_stopped_cold_or_imported(
    small_root: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str], tmp_path: Path
) -> None:
    env = {**engine_env, "SNAPSHOTD_LAYER_BUDGET": "0"}
    with daemon_with(small_root, tmp_path_factory.mktemp("cold") / "state", env) as snap:
        _each_kind_of_source(snap, tmp_path)


def _each_kind_of_source(snap: Snap, tmp_path: Path) -> None:
    trajectory, _ = snap.create("--runtime", "runc")
    snapshot = snap.sh(trajectory, "echo base > f")["snapshot"]
    ways = ("--variant", "a:env.WAY=a", "--variant", f"b:files.f={tmp_path}/b")
    (tmp_path / "b").write_text("b\n")

    def check(ref: str) -> None:
        made = snap.json("fork", ref, *ways)["trajectories"]
        for fork, content in zip(made, ("base a\n", "b \n"), strict=True):
            assert snap.sh(fork, "echo $(cat f) $WAY")["stdout"].split() == content.split()
            snap("rm", "--force", fork)

    check(trajectory)
    check(snapshot)
    snap("stop", "--wait", "stored", trajectory)
    wait_until(lambda: snap.json("df")["layer_bytes"] == 0, "all layers are evicted", pause_s=0.2)
    check(snapshot)
    bundle = tmp_path / "line.snap"
    snap("export", snapshot, "-o", bundle)
    snap("rm", trajectory)
    (imported,) = snap.json("import", bundle)["trajectories"]
    check(imported)
    snap("rm", imported)
