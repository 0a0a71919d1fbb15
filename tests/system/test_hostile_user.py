"""Another user of the machine against root's snapshots and the daemon's life, through the hooks' socket, folders, names,
links, paths below /proc and slow connections: nothing is read, nothing is replaced, and the API answers meanwhile."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.api.wire import hook_socket_of
from snapshotd.client.client import Snapshotd
from tests import long
from tests.e2e.hooked import Agent
from tests.e2e.support import Snap, wait_until
from tests.leftovers import instance_of
from tests.stranger import NOBODY, Stranger


@pytest.fixture
def stranger(empty_snap: Snap) -> Iterator[Stranger]:
    found = Stranger(hook_socket_of(empty_snap.state_dir))
    yield found
    found.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may write to."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def folder_of(place: Path, name: str, uid: int, content: str) -> Path:
    """A folder of a user, with one file."""
    folder = place / name
    folder.mkdir()
    (folder / "file").write_text(content)
    for path in (folder, folder / "file"):
        os.chown(path, uid, uid)
    return folder


@pytest.fixture
def theirs(place: Path, stranger: Stranger) -> Path:
    """A folder of the stranger that the daemon knows."""
    folder = folder_of(place, "theirs", NOBODY, "theirs")
    assert stranger.hook(folder, "SessionStart") == (0, "")
    return folder


@pytest.fixture
def mine(empty_snap: Snap, place: Path) -> Iterator[str]:
    """The newest snapshot of a folder of root's."""
    root = Stranger(hook_socket_of(empty_snap.state_dir), 0)
    folder = folder_of(place, "mine", 0, "root's\n")
    assert root.hook(folder, "SessionStart") == (0, "")
    yield newest(empty_snap, folder)
    root.close()


def newest(empty_snap: Snap, folder: Path) -> str:
    """The head of a folder's trajectory."""
    (head,) = [
        line["head"]
        for line in empty_snap.json("ls")
        if empty_snap.json("log", "--all", line["id"])[0]["tool"]["arguments"].get("folder") == str(folder)
    ]
    return str(head)


# -- names -------------------------------------------------------------------------------------------------------------


def test_an_answer_tells_nothing_of_others_snapshots(mine: str, theirs: Path, stranger: Stranger) -> None:
    wrong = mine[:-1] + ("0" if mine[-1] != "0" else "1")
    for options in (["--dry-run"], []):
        found = {
            stranger.ask(theirs, "rewind", *options, ref)[1].replace(ref, "REF")
            for ref in (mine, wrong, mine[:8], wrong[:7], "0" * 32, "mine", "nothing")
        }
        assert found == {"snapshotd: there is no snapshot 'REF' of this folder; its log lists them\n"}


def test_a_name_of_a_user_stands_for_no_snapshot_of_roots(
    empty_snap: Snap, mine: str, theirs: Path, stranger: Stranger, place: Path
) -> None:
    for name in (mine, mine[:12], mine[:4]):
        code, text = stranger.ask(theirs, "checkpoint", name)
        assert (code, "taken for an id" in text) == (2, True)
        folder = folder_of(place, name, NOBODY, "theirs")
        assert stranger.hook(folder, "SessionStart") == (0, "")
    assert empty_snap("cat", f"{mine}:/workspace/file").stdout == "root's\n"
    assert empty_snap("cat", f"{mine[:12]}:/workspace/file").stdout == "root's\n"


def test_names_of_a_users_folder_are_the_users_own(
    empty_snap: Snap, mine: str, theirs: Path, stranger: Stranger, place: Path
) -> None:
    other = Stranger(hook_socket_of(empty_snap.state_dir), NOBODY - 1)
    theirs_too = folder_of(place, "theirs-too", NOBODY - 1, "other")
    assert other.hook(theirs_too, "SessionStart") == (0, "")
    empty_snap("tag", mine, "before")
    for one, folder in ((stranger, theirs), (other, theirs_too)):
        code, text = one.ask(folder, "checkpoint", "before")
        assert (code, text.endswith(" is before\n")) == (0, True)
        assert one.ask(folder, "rewind", "--dry-run", "before")[0] == 0
        assert "  before\n" in one.ask(folder, "log")[1]
    other.close()
    contents = [
        empty_snap("cat", f"{ref}:/workspace/file").stdout for ref in ("before", f"before@{NOBODY}", f"theirs@{NOBODY}")
    ]
    assert contents == ["root's\n", "theirs", "theirs"]
    empty_snap("tag", mine, f"x@{NOBODY}", code=2)
    empty_snap("tag", "--delete", f"before@{NOBODY}")
    assert stranger.ask(theirs, "rewind", "--dry-run", "before")[0] == 4
    empty_snap("tag", "--delete", "before")


# -- links, mounts and paths below /proc -------------------------------------------------------------------------------

_MOUNTED = """
import os, subprocess, sys
from snapshotd.engine.folders.scan import FolderIndex, open_file
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
folder = sys.argv[1]
for name in ("proc", "maps"):
    subprocess.run(["mount", "--bind", "/proc" if name == "proc" else f"/proc/{os.getpid()}/maps", f"{folder}/{name}"], check=True)
fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
print(open(f"{folder}/maps").read(1) != "")
with acting_as(HostUser(65534, 65534)):
    print(sorted(FolderIndex().scan(fd).changed))
    for look in (lambda: files.open_deep(fd, b"proc/%d" % os.getpid(), one_device=True), lambda: open_file(fd, "maps")):
        try:
            look()
        except OSError as exc:
            print(exc.errno)
"""


def test_what_is_mounted_in_a_folder_is_not_entered(place: Path) -> None:
    """A user may mount in a namespace of the own, and send a descriptor from there. A file of /proc that is about the
    daemon itself opens for it with any rights."""
    for name in ("proc", "real"):
        (place / name).mkdir()
    for name in ("maps", "real/file"):
        (place / name).touch()
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", _MOUNTED, place], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["True", "['maps', 'real', 'real/file']", "18", "22"]


def test_no_path_of_an_event_leads_through_the_daemon(empty_snap: Snap, theirs: Path, stranger: Stranger) -> None:
    """Its descriptors lead into root's state and sandboxes, past directories that are closed to others."""
    text = '{"uuid": "u", "message": {"role": "user", "content": "root knows this"}}\n'
    daemon = Path(f"/proc/{empty_snap.daemon_pid()}/fd")
    state = [fd for fd in daemon.iterdir() if os.readlink(fd).startswith(str(empty_snap.state_dir))]
    open_ones = [fd for fd in state if stat.S_ISDIR(fd.stat().st_mode) and fd.stat().st_mode & 1]
    assert open_ones, "the daemon holds no directory that others may pass through"
    for fd in open_ones:
        (fd / "secret.jsonl").write_text(text)
        os.chmod(fd / "secret.jsonl", 0o644)
    try:
        for number, fd in enumerate(open_ones):
            stranger(f"os.symlink('/proc/self/fd/{fd.name}', {str(theirs / f'link{number}')!r})")
            for path in (f"/proc/self/fd/{fd.name}", f"/proc/thread-self/fd/{fd.name}", str(theirs / f"link{number}")):
                event = {"tool_use_id": "t", "tool_response": {}, "transcript_path": f"{path}/secret.jsonl"}
                assert stranger.hook(theirs, "PostToolUse", **event) == (0, "")
        (line,) = [one["id"] for one in empty_snap.json("ls") if one["name"] == f"{theirs.name}@{NOBODY}"]
        assert "root knows this" not in json.dumps(empty_snap.json("show", "--conversation", line))
    finally:
        for fd in open_ones:
            (fd / "secret.jsonl").unlink(missing_ok=True)


def test_a_folder_that_the_kernel_makes_up_is_refused(stranger: Stranger, empty_snap: Snap) -> None:
    for folder in ("/proc/self", f"/proc/{empty_snap.daemon_pid()}", "/sys/kernel"):
        code, text = stranger.hook(Path(folder), "SessionStart")
        assert (code, "the kernel makes up" in text) == (8, True), text


def test_nothing_of_the_state_is_open_to_others(empty_snap: Snap, mine: str, stranger: Stranger) -> None:
    """Files, sockets and directories: below the state directory, below /run, and sockets without a path."""
    look = """
import os, socket
def looked(top):
    found = []
    for base, names, files in os.walk(top, onerror=lambda exc: None):
        found += [os.path.join(base, name) for name in names + files]
    return found
def connects(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        try:
            s.connect(path)
            return True
        except OSError:
            return False
"""
    stranger.runs(look.splitlines())
    assert stranger(f"looked({str(empty_snap.state_dir)!r})") == []
    assert stranger("looked('/run/snapshotd')") == []
    sockets = [
        path
        for top in (empty_snap.state_dir, Path("/run/snapshotd") / instance_of(empty_snap.state_dir))
        for path in top.rglob("*.sock")
    ]
    assert sockets
    for path in sockets:
        assert not stranger(f"connects({str(path)!r})"), path
    abstract = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if " @" in line]
    assert [
        name for name in abstract if str(empty_snap.state_dir) in name or instance_of(empty_snap.state_dir) in name
    ] == []


# -- the daemon's life -------------------------------------------------------------------------------------------------


def test_sessions_and_long_ids_hold_nothing_of_the_daemon(empty_snap: Snap, theirs: Path, stranger: Stranger) -> None:
    descriptors = Path(f"/proc/{empty_snap.daemon_pid()}/fd")
    assert stranger.hook(theirs, "PreToolUse", tool_use_id="t") == (0, "")
    before = len(list(descriptors.iterdir()))
    for number in range(60):
        assert stranger.hook(theirs, "PreToolUse", tool_use_id="t", session_id=f"s-{number}") == (0, "")
    assert len(list(descriptors.iterdir())) < before + 30
    for name in ("session_id", "tool_use_id", "agent_id", "transcript_path", "cwd"):
        code, text = stranger(f"hook({str(theirs)!r}, 'PreToolUse', {name}='x' * 100_000)")
        assert (code != 0, "has an id or path of 100000 characters" in text) == (True, True), name


def test_the_folders_of_a_user_do_not_blind_the_daemon_for_others(
    empty_snap: Snap, place: Path, stranger: Stranger
) -> None:
    agent = Agent(empty_snap, folder_of(place, "watched", 0, "root's\n"))
    agent.hook("SessionStart")
    target = agent.steps()[-1]["id"]
    agent.before("long")
    for number in range(12):
        assert stranger.hook(folder_of(place, f"f{number}", NOBODY, "theirs"), "SessionStart") == (0, "")
    (agent.folder / "by-hand").write_text("a person's\n")
    agent.run(["bash", "-c", "echo made > made"])
    agent.after("long")
    agent.rewind(target)
    assert agent.files() == {"file": "root's\n", "by-hand": "a person's\n"}
    agent.close()


def test_files_that_could_not_be_read_are_not_the_agents(empty_snap: Snap, place: Path) -> None:
    folder = folder_of(place, "closed", NOBODY, "theirs")
    (folder / "private").mkdir()
    (folder / "private" / "diary").write_text("a person's\n")
    (folder / "secret").write_text("a person's\n")
    for path in (folder / "private", folder / "private" / "diary", folder / "secret"):
        os.chown(path, NOBODY, NOBODY)
        os.chmod(path, 0)
    agent = Stranger(hook_socket_of(empty_snap.state_dir))
    for name in ("SessionStart", "UserPromptSubmit"):
        assert agent.hook(folder, name, prompt="x") == (0, "")
    target = newest(empty_snap, folder)
    agent.hook(folder, "PreToolUse", tool_use_id="t")
    for path in (folder / "private", folder / "private" / "diary", folder / "secret"):
        assert agent(f"os.chmod({str(path)!r}, 0o755)") is None
    agent.hook(folder, "PostToolUse", tool_use_id="t", tool_response={})
    code, text = agent.ask(folder, "rewind", "--files", target)
    assert (code, "secret stays" in text) == (0, True), text
    assert (folder / "private" / "diary").read_text() == (folder / "secret").read_text() == "a person's\n"
    agent.close()


class Answering:
    """Asks the API again and again, and keeps the longest time that an answer took."""

    def __init__(self, empty_snap: Snap) -> None:
        self._client = Snapshotd(empty_snap.state_dir)
        self._end = threading.Event()
        self.longest_s, self.answers = 0.0, 0
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._end.wait(0.02):
            began = time.monotonic()
            self._client.trajectories()
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.answers += 1

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


ATTACK = """
import random
PIECES = ["a*", "**/", "?", "[!b]", "[ab]*", "a", "b*"]
def made(number):
    folder = os.path.join(PLACE, "f%d" % number)
    os.mkdir(folder)
    with open(folder + "/.gitignore", "w") as file:
        file.write("a*" * 14 + "b\\n")
        for line in range(3000):
            file.write("!" * (line % 2) + "".join(random.choice(PIECES) for _ in range(8)) + "\\n")
    for n in range(FILES):
        open(folder + "/" + ("a" * 120 + "%d") % n, "w").close()
    os.mkfifo(folder + "/fifo")
    deep = folder
    for _ in range(60):
        deep += "/d"
        os.mkdir(deep)
    return folder
def attack(number):
    folder, huge = made(number), '{"hook_event_name": "PreToolUse", "tool_input": '
    for text in (huge + "[" + "[]," * 3000000 + "1]}", huge + "[" * 2000000, "}" * 100000, huge + '"' + "x" * 9000000 + '"}'):
        ask(["hook", "claude"], folder, text)
    for transcript in (folder + "/fifo", "/dev/zero", "/proc/kmsg", folder, "/proc/self/mem", "x\\0y"):
        hook(folder, "PostToolUse", transcript_path=transcript, tool_use_id=str(number), tool_response=["x"] * 1000)
    for words in (["rewind", "0" * 8], ["checkpoint", "x" * 100], ["undo"], ["log"], ["\\udcff"] * 500, ["rewind"] * 4000):
        ask(words, folder)
threads = [threading.Thread(target=attack, args=(number,)) for number in range(THREADS)]
for thread in threads:
    thread.start()
"""


def test_connections_that_send_nothing_take_no_others_place(
    empty_snap: Snap, theirs: Path, place: Path, stranger: Stranger
) -> None:
    other = Stranger(hook_socket_of(empty_snap.state_dir), NOBODY - 1)
    folder = folder_of(place, "others", NOBODY - 1, "other")
    begun = f"connect(['hook', 'claude'], {str(theirs)!r}, b'{{')"
    stranger.runs(["slow = [connect() for _ in range(100)]", f"slow += [{begun} for _ in range(100)]"])
    assert stranger(f"hook({str(theirs)!r}, 'SessionStart')")[0] != 0, "the user has no place left"
    assert other.hook(folder, "SessionStart") == (0, "")
    stranger("[s.close() for s in slow]")
    wait_until(lambda: stranger(f"hook({str(theirs)!r}, 'SessionStart')") == [0, ""], "the places are free again")
    other.close()


@pytest.mark.long
def test_a_slow_request_has_one_deadline(empty_snap: Snap, theirs: Path, stranger: Stranger) -> None:
    """Byte by byte, each of which comes in time."""
    began = time.monotonic()
    statements = [
        f"s = connect(['hook', 'claude'], {str(theirs)!r}, b'{{')",
        "s.settimeout(0.5)",
        "ended = False",
        f"while not ended and time.monotonic() < {began} + 50:",
        "    with contextlib.suppress(TimeoutError):",
        "        ended = s.recv(100) or True",
        "    with contextlib.suppress(OSError):",
        "        s.send(b' ')",
    ]
    stranger.runs(statements)
    assert b"no snapshot" in eval(stranger("repr(ended)"))


def test_the_api_and_other_users_are_answered_meanwhile(
    empty_snap: Snap, mine: str, place: Path, stranger: Stranger
) -> None:
    """Threads of hostile folders, texts and names. The bound is one for
    a machine with much else to do; what was mended held the daemon for hours."""
    other = Stranger(hook_socket_of(empty_snap.state_dir), NOBODY - 1)
    folder = folder_of(place, "others", NOBODY - 1, "other")
    stranger(f"globals().update(PLACE={str(place)!r}, FILES={long.size(20, 300)}, THREADS={long.size(2, 6)})")
    before = empty_snap("cat", f"{mine}:/workspace/file").stdout
    with Answering(empty_snap) as api:
        stranger.runs(ATTACK.splitlines())
        longest_s, rounds = 0.0, 0
        while stranger("any(thread.is_alive() for thread in threads)"):
            began = time.monotonic()
            assert other.hook(folder, "UserPromptSubmit", prompt=str(rounds)) == (0, "")
            longest_s, rounds = max(longest_s, time.monotonic() - began), rounds + 1
    assert rounds
    assert api.longest_s < 5
    assert longest_s < 15
    assert empty_snap("cat", f"{mine}:/workspace/file").stdout == before
    errors = [
        line
        for line in (empty_snap.state_dir / "daemon.log").read_text().splitlines()
        if '"level":"ERROR"' in line.upper()
    ]
    assert errors == []
    other.close()
