"""A rewind in a user's own folder touches what the agent's calls left there, and nothing else: whoever writes beside it,
and whenever."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from tests import long
from tests.e2e.hooked import Agent
from tests.e2e.support import Snap, wait_until


@pytest.fixture
def agents(empty_snap: Snap, tmp_path: Path) -> Iterator[list[Agent]]:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes").write_text("mine\n")
    (folder / ".gitignore").write_text("*.log\n")
    found = [Agent(empty_snap, folder, name) for name in ("s-1", "s-2")]
    found[0].hook("SessionStart")
    yield found
    for one in found:
        one.close()
    for line in empty_snap.json("ls"):
        empty_snap("rm", "--force", line["id"])


@pytest.fixture
def agent(agents: list[Agent]) -> Agent:
    return agents[0]


def head(agent: Agent) -> str:
    return str(agent.steps()[-1]["id"])


# -- rules that change -----------------------------------------------------------------------------------------------------


@pytest.mark.long  # random rules: model/test_folder_machine.py
def test_an_ignored_file_that_was_there_stays_when_the_rules_change(agent: Agent) -> None:
    (agent.folder / "x.log").write_text("a person's\n")
    target = head(agent)
    agent.do("echo other > .gitignore")
    agent.do("echo made > made")
    agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "mine\n", "x.log": "a person's\n"}


@pytest.mark.long  # random rules: model/test_folder_machine.py
def test_a_file_that_becomes_ignored_and_goes_comes_back(agent: Agent) -> None:
    target = head(agent)
    agent.do("echo notes >> .gitignore")
    agent.do("rm notes")
    agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "mine\n"}


@pytest.mark.long  # daemons that come and go: test_hooks.py
def test_a_tracked_file_stays_tracked_over_a_restart(agent: Agent) -> None:
    agent.do("echo notes >> .gitignore")
    target = head(agent)
    agent.snap.stop_daemon()
    agent.snap("ls")
    agent.do("rm notes")
    agent.rewind(target)
    assert agent.files()["notes"] == "mine\n"


# -- calls that do not end -------------------------------------------------------------------------------------------------


def test_an_agent_that_is_killed_in_a_call_has_made_what_it_made(agent: Agent) -> None:
    target = head(agent)
    agent.before("cut")
    agent.run(["bash", "-c", "echo half > half"])
    agent.kill()
    wait_until(lambda: agent.names()[-1] == "Bash", "the call ends with its agent")
    (agent.folder / "notes").write_text("a person's\n")
    (agent.folder / "by-hand").write_text("a person's\n")
    other = Agent(agent.snap, agent.folder, "s-3")
    other.hook("UserPromptSubmit", prompt="go on")
    agent.rewind("--session", "s-1", target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "a person's\n", "by-hand": "a person's\n"}
    other.close()


@pytest.mark.long  # one that is cut off: the test before
def test_a_call_that_never_ends_does_not_take_what_a_person_writes(agent: Agent) -> None:
    """A call of Codex that yields tells no end."""
    target = head(agent)
    agent.before("yields")
    agent.run(["bash", "-c", "echo half > half"])
    (agent.folder / "notes").write_text("a person's\n")
    agent.do("echo made > made")
    (agent.folder / "by-hand").write_text("a person's\n")
    agent.do("true")
    agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "a person's\n", "by-hand": "a person's\n"}


@pytest.mark.long  # one that is cut off: two tests above
def test_a_call_that_began_before_the_daemon_takes_nothing_of_the_time_between(agent: Agent) -> None:
    target = head(agent)
    agent.before("over")
    agent.snap.stop_daemon()
    (agent.folder / "by-hand").write_text("a person's\n")
    agent.snap("ls")
    agent.after("over")
    agent.rewind(target)
    assert agent.files()["by-hand"] == "a person's\n"


# -- files that no snapshot had ---------------------------------------------------------------------------------------------


def test_a_file_that_the_agent_moves_into_sight_is_no_file_of_its_own(agent: Agent) -> None:
    (agent.folder / "ignored.log").write_text("a person's\n")
    (agent.folder / "other.log").write_text("a person's\n")
    (agent.folder / "node_modules").mkdir()
    (agent.folder / "node_modules" / "patched").write_text("a person's\n")
    (agent.folder.parent / "outside").write_text("a person's\n")
    agent.hook("UserPromptSubmit", prompt="x")
    target = head(agent)
    agent.do(
        "mv ignored.log kept; mv ../outside outside; mv node_modules modules; mv other.log notes; echo made > made"
    )
    facts = agent.rewind(target)
    kept = ("kept", "outside", "modules/patched", "notes")
    assert agent.files() == {".gitignore": "*.log\n", **dict.fromkeys(kept, "a person's\n")}
    assert {*kept} <= {line.split(" ")[0] for line in facts["left"]}, facts


@pytest.mark.long  # one that is moved into sight: the test before
def test_a_file_that_becomes_small_enough_was_there_before(agent: Agent) -> None:
    with (agent.folder / "large").open("w") as file:
        file.write("a person's\n")
        file.truncate(257 << 20)
    agent.hook("UserPromptSubmit", prompt="x")
    target = head(agent)
    agent.do("truncate -s 11 large; truncate -s 257M notes")
    facts = agent.rewind(target)
    assert (agent.folder / "large").read_text() == "a person's\n"
    assert {line.split(" ")[0] for line in facts["left"]} == {"large", "notes"}, facts


@pytest.mark.long  # one that the agent edits, too: test_a_person_who_changed_a_file_in_between_keeps_it_and_is_told
def test_a_file_that_a_person_edits_and_the_agent_renames_stays(agent: Agent) -> None:
    target = head(agent)
    agent.before("long")
    (agent.folder / "notes").write_text("a person's newer ones\n")
    agent.run(["bash", "-c", "mv notes renamed; sleep 0.2"])
    agent.after("long")
    agent.rewind(target)
    assert agent.files()["renamed"] == "a person's newer ones\n"


@pytest.mark.long  # root's: the other tests
def test_files_of_others_in_roots_folder_stay_theirs(agent: Agent) -> None:
    (agent.folder / "d").mkdir()
    (agent.folder / "d" / "link").symlink_to("nowhere")
    for name in ("notes", "d/link"):
        os.chown(agent.folder / name, 1000, 1001, follow_symlinks=False)
    agent.hook("UserPromptSubmit", prompt="x")
    target = head(agent)
    agent.do("echo more >> notes; rm -r d")
    agent.rewind(target)
    for name in ("notes", "d/link"):
        st = (agent.folder / name).lstat()
        assert (st.st_uid, st.st_gid) == (1000, 1001), name


# -- others beside the call ------------------------------------------------------------------------------------------------


def test_what_an_editor_writes_during_a_call_is_no_change_of_the_call(agent: Agent) -> None:
    target = head(agent)
    agent.do("mkdir d")
    agent.before("long")
    (agent.folder / "by-hand").write_text("a person's\n")
    agent.run(["bash", "-c", "echo made > d/made"])
    (agent.folder / "d" / "beside").write_text("a person's\n")
    agent.after("long")
    assert agent.names()[-2:] == ["edits", "Bash"]
    facts = agent.rewind(target)
    assert agent.files() == {
        ".gitignore": "*.log\n",
        "notes": "mine\n",
        "by-hand": "a person's\n",
        "d/beside": "a person's\n",
    }
    assert [one for one in facts["left"] if one.startswith("d ")], facts


def test_a_rewind_of_one_session_leaves_the_work_of_the_other(agents: list[Agent]) -> None:
    one, two = agents
    target = head(one)
    one.do("echo 1 > one; echo 1 > both")
    two.do("echo 2 > two; echo 2 >> both")
    facts = one.rewind("--session", "s-1", target)
    assert one.files() == {".gitignore": "*.log\n", "notes": "mine\n", "two": "2\n", "both": "1\n2\n"}
    assert any(line.startswith("both ") and "s-2" in line for line in facts["left"]), facts
    one.snap("undo", one.trajectory)
    assert one.files()["one"] == "1\n"
    refused = one.snap("rewind", "--files", one.trajectory, target, code=None)
    assert refused.returncode != 0
    assert "2 sessions have changed files" in refused.stderr
    one.rewind("--session", "all", target)
    assert one.files() == {".gitignore": "*.log\n", "notes": "mine\n"}


@pytest.mark.long  # by the command line: the test before
def test_a_slash_command_takes_back_the_work_of_its_own_session(agents: list[Agent]) -> None:
    one, two = agents
    target = head(one)
    one.do("echo 1 > one")
    two.do("echo 2 > two")
    one.send("rewind", "--files", target)
    assert one.files() == {".gitignore": "*.log\n", "notes": "mine\n", "two": "2\n"}


@pytest.mark.long  # one after the other: two tests above
def test_sessions_whose_calls_overlap_are_told_apart(agents: list[Agent]) -> None:
    one, two = agents
    target = head(one)
    one.before("a")
    two.before("b")
    one.run([sys.executable, "-c", "open('one', 'w').write('1')"])
    two.run([sys.executable, "-c", "open('two', 'w').write('2')"])
    one.after("a")
    two.after("b")
    one.rewind("--session", "s-1", target)
    assert one.files() == {".gitignore": "*.log\n", "notes": "mine\n", "two": "2"}


@pytest.mark.long  # of two processes: three tests above
def test_sessions_of_one_process_are_not_taken_for_one_another(agent: Agent) -> None:
    target = head(agent)
    for agent.session in ("A", "B"):
        agent.before("call")
    agent.run([sys.executable, "-c", "open('of-a', 'w').write('1')"])
    agent.session = "A"
    agent.after("call")
    agent.session = "B"
    agent.run([sys.executable, "-c", "open('of-b', 'w').write('2')"])
    agent.after("call")
    facts = agent.rewind("--session", "B", target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "mine\n", "of-a": "1"}
    assert any(line.startswith("of-a ") for line in facts["left"]), facts


# -- names and numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.long  # names of any bytes: test_hook_folders.py, model
def test_a_name_that_is_no_text_and_one_that_looks_like_it_are_two(agent: Agent) -> None:
    (agent.folder / "\\xff").write_text("as it was\n")
    agent.hook("UserPromptSubmit", prompt="x")
    target = head(agent)
    agent.do("echo made > $'\\xff'")
    (agent.folder / "\\xff").write_text("a person's\n")
    agent.rewind(target)
    assert sorted(os.listdir(os.fsencode(agent.folder))) == [b".gitignore", b"\\xff", b"notes"]
    assert (agent.folder / "\\xff").read_text() == "a person's\n"


@pytest.mark.long  # its bounds: unit/engine
def test_a_call_with_very_many_files_is_that_of_those_files(agent: Agent) -> None:
    target = head(agent)
    agent.do("mkdir many; for n in $(seq 5100); do : > many/$n; done")
    (agent.folder / "notes").write_text("a person's\n")
    agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "a person's\n"}


def test_a_person_who_changed_a_file_in_between_keeps_it_and_is_told(agent: Agent) -> None:
    target = head(agent)
    agent.do("echo agent > notes; echo made > made")
    (agent.folder / "notes").write_text("a person's\n")
    agent.do("echo more >> notes")
    facts = agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "a person's\nmore\n"}
    assert [one for one in facts["left"] if one.startswith("notes ")], facts
    preview = agent.snap("rewind", "--preview", "--files", agent.trajectory, target)
    assert "notes stays" in preview.stdout


# -- files with several names ----------------------------------------------------------------------------------------------


@pytest.fixture
def linked(agent: Agent) -> Agent:
    """In the folder is a file of a person's with three names, one of them ignored, and one with two."""
    (agent.folder / "d").mkdir()
    os.link(agent.folder / "notes", agent.folder / "d" / "same")
    os.link(agent.folder / "notes", agent.folder / "same.log")
    (agent.folder / "a").write_text("as it was\n")
    os.link(agent.folder / "a", agent.folder / "d" / "b")
    agent.hook("UserPromptSubmit", prompt="x")
    return agent


@pytest.mark.parametrize("restarted", long.some([False, True], 1))
def test_all_names_of_a_file_that_the_agent_changed_go_back(linked: Agent, restarted: bool) -> None:
    agent, target = linked, head(linked)
    before = agent.files()
    agent.do("echo agent >> d/b; ln a made")
    changed = agent.files()
    assert changed["a"] == changed["d/b"] == changed["made"] == "as it was\nagent\n"
    if restarted:
        agent.snap.stop_daemon()
        agent.snap("ls")
    facts = agent.rewind(target)
    assert agent.files() == before, facts
    assert (agent.folder / "a").samefile(agent.folder / "d" / "b")
    assert (agent.folder / "a").stat().st_nlink == 2
    agent.snap("undo", agent.trajectory)
    assert agent.files() == changed
    assert (agent.folder / "a").stat().st_nlink == 3


@pytest.mark.long  # in the folder: the test before
def test_names_of_a_file_are_names_of_one_in_the_snapshot(linked: Agent, tmp_path: Path) -> None:
    linked.do("mkdir many; for n in $(seq 300); do ln a many/$n; done; echo more >> many/7")
    linked.snap("restore", head(linked), "--to", tmp_path / "restored")
    restored = tmp_path / "restored" / "workspace"
    assert (restored / "notes").samefile(restored / "d" / "same")
    assert (restored / "a").read_text() == "as it was\nmore\n"
    assert (restored / "a").stat().st_nlink == 302


@pytest.mark.parametrize("through", long.some(["notes", "d/same", "same.log"], 1))
def test_a_person_who_changes_a_file_by_any_name_during_a_call_keeps_it(linked: Agent, through: str) -> None:
    agent, target = linked, head(linked)
    agent.before("long")
    with (agent.folder / through).open("a") as file:
        file.write("a person's\n")
    agent.run(["bash", "-c", "echo made > made"])
    agent.after("long")
    facts = agent.rewind(target)
    names = ("notes", "d/same", "same.log")
    assert {agent.files()[name] for name in names} == {"mine\na person's\n"}, facts
    assert "made" not in agent.files()
    assert (agent.folder / "notes").stat().st_nlink == 3


# -- databases and secrets -------------------------------------------------------------------------------------------------


def test_ignored_files_that_a_rewind_would_need_are_named(agent: Agent) -> None:
    agent.do("echo '.env' >> .gitignore; echo KEY=1 > .env")
    target = head(agent)
    agent.do("echo KEY=2 > .env; echo made > made")
    facts = agent.rewind(target)
    assert any(one.startswith(".env ") for one in facts["left"]), facts
    assert (agent.folder / ".env").read_text() == "KEY=2\n"


def test_a_database_is_taken_back_with_its_log_or_not_at_all(agent: Agent) -> None:
    """`-wal` beside a database of another moment would damage it."""
    database = agent.folder / "app.db"
    make = "import sqlite3; c = sqlite3.connect('app.db'); c.execute('PRAGMA journal_mode=WAL'); "
    agent.do(f"{sys.executable} -c \"{make}c.execute('CREATE TABLE t (x)'); c.commit()\"")
    target = head(agent)
    hold = sqlite3.connect(database)
    assert hold.execute("SELECT count(*) FROM t").fetchone() == (0,)
    agent.do(f"{sys.executable} -c \"{make}c.execute('INSERT INTO t VALUES (1)'); c.commit(); import os; os._exit(0)\"")
    facts = agent.rewind(target)
    assert hold.execute("SELECT count(*) FROM t").fetchone() == (1,), "it is open"
    assert any(one.startswith("app.db") for one in facts["left"]), facts
    hold.close()


@pytest.mark.long  # one whose log is not: the test before
def test_a_database_whose_log_is_ignored_is_said(agent: Agent) -> None:
    agent.do("printf '*-wal\\n' >> .gitignore")
    make = "import sqlite3, os; c = sqlite3.connect('app.db'); c.execute('PRAGMA journal_mode=WAL'); "
    agent.do(f"{sys.executable} -c \"{make}c.execute('CREATE TABLE t (x)'); c.commit(); os._exit(0)\"")
    assert "app.db-wal" in json.dumps(agent.snap.json("show", head(agent))["warnings"])


# -- edits while the rewind runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", long.some(["in place", "replaced", "appended"], 1))
def test_no_edit_is_lost_that_is_made_while_the_rewind_runs(agent: Agent, way: str) -> None:
    """The writer goes through all files, again and again; each must have the last that it wrote."""
    count = long.size(300, 1500)
    agent.do(f"mkdir d; for n in $(seq {count}); do echo before > d/$n; done")
    target = head(agent)
    agent.do(
        "for n in d/*; do echo after > $n; done; for n in d/*7; do rm $n; done; for n in $(seq 50); do : > d/new$n; done"
    )
    written: dict[str, list[str]] = {}
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            for name in sorted(os.listdir(agent.folder / "d")):
                path, text = agent.folder / "d" / name, f"edit {number}\n"
                number += 1
                try:
                    if way == "in place":
                        with path.open("r+") as file:
                            file.write(text)
                            file.truncate()
                    elif way == "appended":
                        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
                        os.write(fd, text.encode())
                        os.close(fd)
                    else:
                        beside = agent.folder.parent / "beside"
                        beside.write_text(text)
                        os.rename(beside, path)
                except FileNotFoundError:
                    continue
                written.setdefault(name, []).append(text)
                if stop.is_set():
                    break

    thread = threading.Thread(target=write)
    thread.start()
    try:
        agent.rewind(target)
    finally:
        stop.set()
        thread.join()
    assert sum(map(len, written.values())) > count // 10
    there = {path.name: path.read_text() for path in (agent.folder / "d").iterdir()}
    everything = "".join(there.values())
    for name, texts in written.items():
        if way == "appended":
            missing = [text for text in texts if text not in everything]
            assert not missing, (name, missing)
        else:
            assert texts[-1] in (
                there.get(name),
                *(text for key, text in there.items() if key.startswith(f"{name}.")),
            ), name


@pytest.mark.parametrize(
    "point",
    [
        "engine.folders.exchanged",
        *(pytest.param(f"engine.folders.{name}", marks=pytest.mark.long) for name in ("put:2", "put_back")),
    ],
)
def test_what_a_person_writes_after_a_rewind_was_cut_off_stays(agent: Agent, point: str) -> None:
    """The daemon died in the middle: what it had moved out of the way comes back, or is the agent's and goes."""
    agent.do("echo 1 > one; echo 2 > two; echo 3 > three")
    target, trajectory = head(agent), agent.trajectory
    agent.do("echo 4 > one; echo 5 > two; rm three; echo 6 > made")
    agent.snap.stop_daemon()
    dies = Snap(agent.snap.state_dir, {**agent.snap.env, "SNAPSHOTD_FAILPOINT": point})
    dies("rewind", "--files", trajectory, target, code=None)
    name = point.partition(":")[0]
    log = agent.snap.state_dir / "daemon.log"
    wait_until(lambda: f"failpoint {name} reached" in log.read_text(), "the daemon died")
    (agent.folder / "two").write_text("a person's\n")
    (agent.folder / "made").write_text("a person's\n")
    agent.snap("ls")
    agent.do("true")
    agent.rewind(target)
    assert agent.files() == {
        ".gitignore": "*.log\n",
        "notes": "mine\n",
        "one": "1\n",
        "two": "a person's\n",
        "three": "3\n",
        "made": "a person's\n",
    }
    agent.snap("undo", trajectory)
    assert agent.files()["two"] == agent.files()["made"] == "a person's\n"


@pytest.mark.long  # what older versions wrote: tests/golden
def test_snapshots_that_did_not_note_their_changes_are_read(agent: Agent) -> None:
    """As an older version wrote them: the calls' paths are in the journal, those of others in the trees alone."""
    agent.do("echo 1 > one")
    target = head(agent)
    agent.do("echo 2 > one; echo agent > notes; echo 3 > made")
    (agent.folder / "notes").write_text("a person's\n")
    agent.hook("UserPromptSubmit", prompt="x")
    agent.snap.stop_daemon()
    catalog = SqliteCatalog(agent.snap.state_dir / "catalog.db")
    with catalog._db.transaction():
        assert catalog._db.write("UPDATE states SET content = json_remove(content, '$.changes')")
    catalog.close()
    agent.snap("ls")
    agent.rewind(target)
    assert agent.files() == {".gitignore": "*.log\n", "notes": "a person's\n", "one": "1\n"}
