"""snapshotd of an ordinary user, with a range of further user ids and with one id: everything that a user does by the
command line, the end of a daemon at any time, isolation as seen from inside, and that nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotd.hooks import send
from tests.built_images import minimal_archive
from tests.e2e.support import Snap
from tests.ordinary_user import OrdinaryUser, interpreter, ordinary_users, wait_until

pytestmark = pytest.mark.runc
WAYS = [pytest.param(True, id="range"), pytest.param(False, id="one-id")]
with_a_range = pytest.mark.parametrize(
    "shared_user", [WAYS[0], pytest.param(False, id="one-id", marks=pytest.mark.long)], indirect=True
)
"""The short set has it with a range alone: what it is about is made the same way with one id, whose tour is there."""
with_one_id = pytest.mark.parametrize(
    "shared_user", [WAYS[1], pytest.param(True, id="range", marks=pytest.mark.long)], indirect=True
)
AGENT = """
import os, sys, time
from snapshotd.agent import tool

@tool
def make(number):
    os.makedirs(f"/workspace/d{number}")
    with open(f"/workspace/d{number}/file", "w") as file:
        file.write(str(number))
    if number:
        os.rename(f"/workspace/d{number - 1}", f"/workspace/e{number - 1}")
    return number

@tool
def wait():
    while not os.path.exists("/workspace/go"):
        time.sleep(0.05)

for number in range(3):
    make(number)
print("waiting", flush=True)
wait()
make(3)
print(sorted(os.listdir("/workspace")), flush=True)
"""
PROBE = r"""
import glob, os, socket, stat, struct, sys
secret, found = sys.argv[1].encode(), []
for top, names, others in os.walk("/", followlinks=False):
    if top.startswith(("/proc", "/sys", "/usr")):
        names.clear()
        continue
    for name in others:
        path = os.path.join(top, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and secret in open(path, "rb").read(1 << 20):
                found.append("secret in " + path)
            if stat.S_ISSOCK(mode) and path != "/run/snapshotd/agent.sock":
                found.append("socket " + path)
            if stat.S_ISBLK(mode):
                found.append("disk " + path)
        except OSError:
            pass
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    try:
        command = open(f"/proc/{name}/cmdline", "rb").read()
        if b"snapshotd daemon" in command.replace(b"\0", b" ") or secret in open(f"/proc/{name}/environ", "rb").read():
            found.append("process " + name)
    except OSError:
        pass
for path in ("/proc/1/root/../../etc/shadow", "/proc/kcore", "/proc/sysrq-trigger"):
    try:
        os.close(os.open(path, os.O_RDWR))
        found.append("open " + path)
    except OSError:
        pass
def refused(what, action):
    try:
        action()
    except OSError:
        return
    found.append(what)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)
refused("a user namespace", lambda: call("unshare", 0x10000000))
refused("a mount", lambda: call("mount", b"none", b"/mnt", b"tmpfs", 0, None))
refused("a write to /proc/sys", lambda: open("/proc/sys/kernel/hostname", "w").write("x"))
refused("the host's network", lambda: socket.create_connection(("1.1.1.1", 53), 2).close())
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
if status["NoNewPrivs"] != "1" or status["Seccomp"] != "2":
    found.append("no filter")
if int(status["CapEff"], 16) >> 21 & 1:
    found.append("CAP_SYS_ADMIN")
print("FOUND", found)
"""


@pytest.fixture(scope="module")
def image_tar(run_folder: Path) -> Path:
    """An image without device nodes, which no ordinary user could make."""
    return minimal_archive(run_folder)


@pytest.fixture(scope="module", params=WAYS)
def shared_user(request: pytest.FixtureRequest, image_tar: Path) -> Iterator[OrdinaryUser]:
    with ordinary_users(ids=[request.param]) as (found,):
        found("image", "import", found.give(image_tar, "image.tar"), "--name", "base")
        yield found
        found("daemon", "--stop", code=None)
        found.nothing_left()


@pytest.fixture
def user(shared_user: OrdinaryUser) -> Iterator[OrdinaryUser]:
    """A user whose daemon has the image `base`, and no trajectories."""
    yield shared_user
    for one in sorted(shared_user.json("ls"), key=lambda one: one["forked_from"] is None):
        shared_user("rm", "--force", one["id"])


@pytest.fixture(scope="module")
def small_tar(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of a few programs, which is taken in at once."""
    archive = tmp_path_factory.mktemp("small") / "small.tar"
    subprocess.run(["tar", "-C", small_root, "-cf", archive, "."], check=True)
    return archive


def at(user: OrdinaryUser, trajectory: str, seq: int) -> str:
    return str(next(each["id"] for each in user.json("log", trajectory) if each["seq"] == seq))


@with_one_id
def test_the_tour(user: OrdinaryUser) -> None:
    def sh(trajectory: str, script: str) -> str:
        return user("exec", trajectory, "--", "sh", "-c", script)

    line = user("create", "--image", "base").strip()
    sh(line, "mkdir -p /w/a/b; echo one >/w/a/f; ln /w/a/f /w/a/g; ln -s f /w/a/l; echo keep >/w/keep")
    assert (
        sh(line, "mv /w/a /w/c && echo two >>/w/c/f && cat /w/c/g") == "one\ntwo\n"
    )  # of an earlier step, and a hard link
    sh(line, "rm -r /w/c/b /etc/passwd; mkdir /w/c/b; echo x >/w/c/b/x")
    assert "captured by delta" in user("show", line)
    assert "A /w/c/b/x" in user("diff", at(user, line, 2), at(user, line, 3))
    sh(line, "true")
    assert "captured by unchanged" in user("show", line)

    fork = user("fork", at(user, line, 2)).split()[0]
    assert sh(fork, "mv /w/c /w/z && cat /w/z/g /etc/passwd | head -n 2") == "one\ntwo\n"
    user("rewind", fork, at(user, line, 2))
    assert sh(fork, "ls /w /w/c") == "/w:\nc\nkeep\n\n/w/c:\nb\nf\ng\nl\n"
    user("rewind", line, at(user, line, 1))
    assert sh(line, "mv /w/a /w/y; stat -c %h /w/y/f; test -e /etc/passwd && echo there") == "2\nthere\n"

    user("restore", line, "--to", user.home / "out")
    restored = user.home / "out" / "w" / "y"
    assert (restored / "f").read_text() == "one\n"
    assert (restored / "f").samefile(restored / "g")
    assert {path.lstat().st_uid for path in (user.home / "out").rglob("*")} == {user.id}

    user("stop", line)
    assert sh(line, "cat /w/y/g; ls /w") == "one\nkeep\ny\n"
    user("daemon", "--stop")
    assert sh(line, "cat /w/y/g") == "one\n"
    assert "0 damaged" in user("check")
    user("export", "--trajectory", line, "-o", user.home / "bundle")
    user("rm", "--force", line, fork)
    user("prune", "--force", "--grace", "0s")
    assert user.json("ls") == []
    imported = user("import", user.home / "bundle").split()[0]
    assert sh(imported, "cat /w/y/g; mv /w/y /w/x; ls /w") == "one\nkeep\nx\n"
    owner = os.stat(f"/proc/{init_of(user)}").st_uid
    assert owner == (user.first if user.ids else user.id)


@with_one_id
def test_what_images_are_given_belongs_to_their_root(user: OrdinaryUser, tmp_path: Path) -> None:
    """The image of this machine's own programs; and one that names few directories, whose others are made for it."""
    few = tmp_path / "few.tar"
    with tarfile.open(few, "w") as archive:
        for program in ("sh", "stat"):
            entry = tarfile.TarInfo(f"opt/own/{program}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
        archive.add("/bin/busybox", "opt/own/busybox")
    user("image", "import", user.give(few, "few.tar"), "--name", "few")
    made = "/ /workspace /tmp /etc /etc/hostname /opt /opt/own"
    script = f"for each in {made}; do [ ! -e $each ] || /opt/own/stat -c %u:%g $each; done; cd /workspace; >here"
    line = user("create", "--image", "few").strip()
    assert set(user("exec", line, "--", "/opt/own/sh", "-c", script).split()) == {"0:0"}
    own = user("create", "--image", "minimal").strip()
    found = user("exec", own, "--", "find", "/", "-xdev", "(", "!", "-uid", "0", "-o", "!", "-gid", "0", ")")
    assert set(found.split()) <= {"/proc", "/sys", "/run/snapshotd"}  # mounts
    for each in (line, own):
        user("stop", each)


def test_a_build_that_is_taken_again_keeps_its_owners() -> None:
    """What one state directory has built, the user's next one unpacks."""
    program = """
import os, sys
from pathlib import Path
from snapshotd.images.shared import SharedBuilds
from snapshotd.kernel import rootless

rootless.enter()
place = Path(sys.argv[1])

def build():
    (place / "first/file").touch()
    os.chown(place / "first/file", 7, 8)

for name in ("first", "second"):
    (place / name).mkdir()
    SharedBuilds(place / "builds").fill("ab" * 32, place / name, build, print)
st = os.stat(place / "second/file")
print(st.st_uid, st.st_gid)
"""
    with ordinary_users(ids=[True]) as (user,):
        assert user.run(interpreter(), "-c", program, user.home).stdout.endswith("7 8\n")


def init_of(user: OrdinaryUser) -> int:
    return next(pid for pid, arguments in user.processes().items() if arguments[0].endswith("/share/init"))


@pytest.fixture
def agent(user: OrdinaryUser) -> Path:
    path = user.home / "agent.py"
    path.write_text(AGENT)
    os.chown(path, user.id, user.id)
    return path


def started(user: OrdinaryUser, agent: Path) -> subprocess.Popen[str]:
    """A run that has come to its wait."""
    argv = user.command(interpreter(), "-m", "snapshotd", "run", "--image", "base", "--name", "it", agent)
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting\n"
    return running


@pytest.mark.long
def test_an_agent_outlives_its_daemon(user: OrdinaryUser, agent: Path) -> None:
    running = started(user, agent)
    user.kill_daemon()
    user("exec", "it", "--", "touch", "/workspace/go")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert out == "['d3', 'e0', 'e1', 'e2', 'go']\n"
    assert "without root: " in err
    assert "no limits of memory" in err


@pytest.mark.long
def test_all_processes_are_killed_and_the_run_is_resumed(user: OrdinaryUser, agent: Path) -> None:
    running = started(user, agent)
    wait_until(lambda: all(one["state"] == "stored" for one in user.json("log", "it")), "no snapshot can be lost")
    for pid in user.processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    running.communicate(timeout=60)
    wait_until(lambda: not user.processes(), "all are gone")
    assert user.json("ls")[0]["status"] == "interrupted"
    resumed = subprocess.Popen(
        user.command(interpreter(), "-m", "snapshotd", "resume", "it"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    wait_until(lambda: resumed.poll() is not None or user.json("ls")[0]["status"] == "running", "it goes on")
    user("exec", "it", "--", "touch", "/workspace/go", code=None)
    out, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err
    assert "['d3', 'e0', 'e1', 'e2', 'go']" in out


@pytest.mark.long
def test_the_keeper_and_the_daemon_are_killed(user: OrdinaryUser, agent: Path) -> None:
    """The sandbox is left alone. Only from inside its user namespace can it be ended, which the next daemon enters."""
    running = started(user, agent)
    init = init_of(user)
    spared = {
        pid for pid, arguments in user.processes().items() if pid == init or "agent.py" in " ".join(arguments[:2])
    }
    for pid in user.processes().keys() - spared:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    running.communicate(timeout=60)
    assert init in user.processes()
    assert user.json("ls")[0]["status"] == "interrupted"
    wait_until(lambda: init not in user.processes(), "the next daemon has ended the sandbox")


@pytest.mark.long
def test_processes_that_live_on_stand_still_for_a_snapshot(user: OrdinaryUser) -> None:
    """By signals, which a stopped process of the sandbox's own keeps."""
    line = user("create", "--image", "base").strip()
    stopper = (
        "sleep 1000 >/dev/null 2>&1 & until read -r name </proc/$!/comm && [ $name = sleep ]; do :; done; kill -STOP $!"
    )
    writer = "i=0; while :; do i=$((i+1)); echo $i >/w/one; echo $i >/w/two; done"
    user("exec", line, "--", "sh", "-c", f"mkdir /w; ({writer}) >/dev/null 2>&1 & {stopper}")
    for _ in range(5):
        user("exec", line, "--", "true")
    for seq in range(2, 7):
        one, two = (user("cat", f"{at(user, line, seq)}:/w/{name}").strip() for name in ("one", "two"))
        first = int(one or int(two) + 1)  # empty: it was just being written
        assert first - int(two or first) in (0, 1)
    stopped = {
        arguments[0]: state(pid) for pid, arguments in user.processes().items() if arguments[0] in ("sh", "sleep")
    }
    assert stopped["sleep"] == "T"
    assert stopped["sh"] in ("R", "S", "D")
    user("stop", line)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@with_a_range
def test_files_are_edited_and_merged(user: OrdinaryUser) -> None:
    """Through an overlay that the daemon mounts for itself."""
    line = user("create", "--image", "base").strip()
    user("exec", line, "--", "sh", "-c", "seq 9 >numbers; echo old >f")
    other = user("fork", line).split()[0]
    user("exec", line, "--", "sed", "-i", "s/^2$/two/", "numbers")
    user("exec", other, "--", "sh", "-c", "sed -i 's/^8$/eight/' numbers; rm f; mkdir d; echo new >d/g")
    user("merge", other, line)
    assert (
        user("exec", line, "--", "sh", "-c", "tr '\\n' ' ' <numbers; mv d e; ls")
        == "1 two 3 4 5 6 7 eight 9 e\nnumbers\n"
    )
    text = user.give(Path(__file__), "text")
    edited = user("edit", line, "--file", f"e/g={text}", "--file", f"new/file={text}").split()[0]
    made = user("exec", edited, "--", "sh", "-c", "stat -c %u:%g new new/file; echo more >>new/file; mkdir new/d")
    assert made == "0:0\n0:0\n"
    assert user("cat", f"{edited}:e/g") == Path(__file__).read_text()
    assert user("exec", edited, "--", "stat", "-c", "%u:%g", "e/g") == "0:0\n"


@with_a_range
def test_a_process_that_waits_for_its_childs_program_stands_still(user: OrdinaryUser) -> None:
    """The kernel stops no process that has called vfork(2) before the child, which is stopped too, runs its program."""
    line = user("create", "--image", "base").strip()
    program = (
        "import os; os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 5, 'fifo', 0, 0)])"
    )
    user(
        "exec", line, "--", "sh", "-c", f"mkfifo fifo; python3 -c \"{program}; open('after', 'w')\" >/dev/null 2>&1 & :"
    )
    wait_until(lambda: any(map(waits_in_vfork, user.processes())), "the child opens what nobody writes to")
    user("exec", line, "--", "touch", "beside")
    user("exec", line, "--", "sh", "-c", ": >fifo; until [ -e after ]; do :; done")


def waits_in_vfork(pid: int) -> bool:
    try:
        return state(pid) == "D" and "posix_spawn" in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


@with_a_range
def test_from_inside_nothing_of_the_host_is_found(user: OrdinaryUser) -> None:
    secret = "the-secret-of-this-user"
    (user.home / "key").write_text(secret)
    os.chown(user.home / "key", user.id, user.id)
    line = user.run(
        interpreter(), "-m", "snapshotd", "create", "--image", "base", env={"TOKEN_OF_HOST": secret}
    ).stdout.strip()
    probe = user.home / "probe.py"
    probe.write_text(PROBE)
    os.chown(probe, user.id, user.id)
    user("exec", line, "--", "python3", "-c", PROBE, secret)
    assert "FOUND []" in user("exec", line, "--", "python3", "-c", PROBE, secret)


@with_one_id
def test_what_cannot_be_had_is_refused(user: OrdinaryUser) -> None:
    said = user.refused("create", "--image", "node", "--memory", "1G")
    assert "cannot limit the memory" in said
    assert "building the image" not in said, "nothing is made before"
    assert "need root's daemon" in user.refused("create", "--image", "base", "--runtime", "docker")
    assert "is for root's daemon" in daemon_with(user, SNAPSHOTD_MODE="pivot")
    report = user("doctor", code=None)
    assert "rootless: sandboxes in a user namespace" in report
    if not user.ids:
        for words in (["create"], ["image", "build", "essential"]):
            said = user.refused(*words)
            assert "an image of packages needs more user ids than the one of this user" in said
            assert "use the image `minimal`" in said
            assert "building the image" not in said
        assert "no 65536 ids" in report


@with_one_id
def test_a_plain_folder_beside_containers(user: OrdinaryUser) -> None:
    """Where a command asks for it; the daemon's mode stays as it is."""
    line = user("create", "--isolation", "none").strip()
    script = "pwd; echo one >f; mkdir d; ln f d/g; touch /etc/elsewhere 2>/dev/null || true"
    said = user("exec", line, "--", "sh", "-c", script)
    assert said.endswith("/workspace\n")
    first = user.json("log", line)[-1]["id"]
    user("exec", line, "--", "sh", "-c", "echo two >>f; rm -r d")
    assert user("cat", f"{first}:f") == "one\n"
    user("rewind", "--yes", line, first)
    assert user("exec", line, "--", "cat", "f", "d/g") == "one\none\n"
    other = user("fork", first).split()[0]
    assert user("exec", other, "--", "cat", "d/g") == "one\n"
    user("restore", first, "--to", user.home / "plain", "--path", "/workspace")
    assert (user.home / "plain/f").stat().st_uid == user.id
    assert "the network none" in user.refused("create", "--isolation", "none", "--network", "none")
    assert "that of an ordinary user's daemon" in daemon_with(user, SNAPSHOTD_MODE="folder")
    beside = user("create", "--image", "base").strip()
    assert user("exec", beside, "--", "cat", "/proc/1/comm") != ""
    for each in (line, other, beside):
        user("stop", each)


_RIGHTS = r"""
import ctypes, os, stat, sys
made, given = os.open("made", os.O_CREAT | os.O_WRONLY), os.open("given", os.O_WRONLY)
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
held = sorted({status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")})
libc, refused = ctypes.CDLL(None), []
for name, *args in (["umount2", b"/root", 2], ["mount", b"none", b"/mnt", b"tmpfs", 0, None], ["sethostname", b"x", 1],
                    ["setuid", 5], ["chown", b"given", 0, 0], ["chroot", b"/"]):
    if getattr(libc, name)(*args):
        refused.append(name)
print(os.getuid(), os.getgid(), os.stat("given").st_uid, held, refused)
"""


@with_a_range
def test_commands_in_a_plain_folder_have_no_rights_but_the_users(user: OrdinaryUser) -> None:
    """Not those of the daemon over the user namespace that it has entered, its mounts and its ids."""
    (project := user.home / "project").mkdir()
    (project / "given").touch()
    subprocess.run(["chown", "-R", f"{user.id}:{user.id}", project], check=True)
    line = user("create", "--isolation", "none", "--workspace", project).strip()
    said = user("exec", line, "--", interpreter(), "-c", _RIGHTS)
    every = ["umount2", "mount", "sethostname", "setuid", "chown", "chroot"]
    assert said.strip() == f"{user.id} {user.id} {user.id} {['0' * 16]} {every}"
    folder = user.state_dir / "layers" / line / "upper"
    assert {path.lstat().st_uid for path in [folder, *folder.rglob("*")]} == {user.id}
    first = user.json("log", line)[-1]["id"]
    user("exec", line, "--", "sh", "-c", "rm given; echo two >made")
    user("rewind", "--yes", line, first)
    user("exec", line, "--", "sh", "-c", "echo three >given")
    other = user("fork", first).split()[0]
    user("exec", other, "--", "sh", "-c", "echo four >given")
    for each in (line, other):
        user("stop", each)


def daemon_with(user: OrdinaryUser, **env: str) -> str:
    user("daemon", "--stop", code=None)
    return user.refused("ls", env=env)


@with_a_range
def test_the_inode_of_a_namespace_that_has_ended_may_be_a_containers_now(user: OrdinaryUser) -> None:
    """The kernel gives it again. A daemon whose note has it makes a user namespace of its own."""
    user("create", "--image", "base")
    own = int((user.state_dir / "namespace").read_text().split()[0])
    those = {os.stat(f"/proc/{pid}/ns/user").st_ino for pid in user.processes()}
    containers = those - {own, os.stat("/proc/self/ns/user").st_ino}
    assert containers
    other, note = {"SNAPSHOTD_STATE_DIR": str(user.home / "other")}, user.home / "other" / "namespace"
    user("ls", env=other)
    user("daemon", "--stop", env=other)
    _, ids = note.read_text().split()
    for inode in containers:
        note.write_text(f"{inode} {ids}")
        user("ls", env=other)
        user("daemon", "--stop", env=other)
        assert int(note.read_text().split()[0]) != inode


@pytest.mark.long
def test_a_state_directory_stays_with_the_range_that_it_has(small_tar: Path) -> None:
    with ordinary_users(ids=[True]) as (user,):
        user("image", "import", user.give(small_tar, "image.tar"), "--name", "base")
        line = user("create", "--image", "base").strip()
        user("exec", line, "--", "sh", "-c", "touch /w; chown 7:7 /w")
        user("daemon", "--stop")
        user.nothing_left()  # a process of the old user namespace would let the daemon into it
        (user._databases / "subuid").write_text("")
        assert "ids of a range that there is no more" in user.refused("ls")
        user.nothing_left()
    with ordinary_users(ids=[False]) as (user,):
        user("image", "import", user.give(small_tar, "image.tar"), "--name", "base")
        line = user("create", "--image", "base").strip()
        user("daemon", "--stop")
        for name in ("subuid", "subgid"):
            (user._databases / name).write_text(f"{user.id}:{user.first}:65536\n")
        assert user("exec", line, "--", "cat", "/proc/self/uid_map").split() == ["0", "0", "1"]
        user("daemon", "--stop")
        user.nothing_left()


@pytest.mark.long
def test_roots_daemon_and_a_users_keep_apart(image_tar: Path, tmp_path: Path) -> None:
    """Trajectories go over as bundles, both ways."""
    root = Snap(tmp_path / "state")
    with ordinary_users(ids=[True]) as (user,):
        try:
            root("image", "import", image_tar, "--name", "base")
            line = root("create", "--image", "base").stdout.strip()
            root("exec", line, "--", "sh", "-c", "mkdir /w; echo roots >/w/f; chown 5:6 /w/f")
            root("export", "--trajectory", line, "-o", tmp_path / "bundle")
            user("import", user.give(tmp_path / "bundle", "bundle"))
            theirs = user.json("ls")[0]["id"]
            assert user("exec", theirs, "--", "sh", "-c", "mv /w /v; stat -c %u:%g /v/f; cat /v/f") == "5:6\nroots\n"
            user("export", "--trajectory", theirs, "-o", user.home / "back")
            root("rm", "--force", line)
            root("import", user.home / "back")
            back = root.json("ls")[0]["id"]
            assert root("exec", back, "--", "stat", "-c", "%u:%g", "/v/f").stdout == "5:6\n"
            user("daemon", "--stop")
            user.nothing_left()
            subprocess.run(["chown", "root:root", user.state_dir], check=True)
            assert "that of an ordinary user's daemon" in Snap(user.state_dir)("ls", code=2).stderr
        finally:
            root.stop_daemon()
        state = Path(shutil.copytree(tmp_path / "state", user.home / "roots", symlinks=True))
        subprocess.run(["chown", "-R", f"{user.id}:{user.id}", state], check=True)
        assert "that of root's daemon" in user.refused("--state-dir", state, "ls")


@pytest.mark.long
def test_two_users_have_two_daemons() -> None:
    with ordinary_users(2, ids=[True, True]) as (one, two):
        line = one("create", "--isolation", "none").strip()
        assert two.json("ls") == []
        said = two.refused("--socket", one.runtime_dir / "snapshotd" / "snapshotd.sock", "ls")
        assert "ermission denied" in said or "may not use" in said
        assert one.json("ls")[0]["id"] == line
        for user in (one, two):
            user("daemon", "--stop")
            user.nothing_left()


def test_a_directory_of_sockets_that_is_another_users() -> None:
    """Without XDG_RUNTIME_DIR the sockets lie below /tmp, where another user may have been first."""
    with ordinary_users(ids=[True]) as (user,):
        place = Path(f"/tmp/snapshotd-{user.id}")
        place.mkdir(mode=0o777)
        try:
            user.env.pop("XDG_RUNTIME_DIR")
            assert f"{place}, the place of the sockets, is not a directory of this user's own" in user.refused("ls")
            os.chown(place, user.id, user.id)
            place.chmod(0o700)
            assert user.json("ls") == []
            user("daemon", "--stop")
            user.nothing_left()
        finally:
            subprocess.run(["rm", "-rf", place], check=True)


@pytest.mark.long  # test_a_machine_whose_apparmor_takes_the_rights_away says what is lacking, too
def test_a_machine_without_user_namespaces() -> None:
    """In a chroot the kernel allows none."""
    with ordinary_users(ids=[True], host="mount --rbind / /mnt", chroot="/mnt") as (user,):
        said = user.refused("ls")
        assert "an ordinary user cannot run sandboxes on this machine: a user namespace cannot be made" in said
        report = user("doctor", code=None)
        assert (
            "folder: a sandbox is a plain folder, without isolation, and only where a command says --isolation none"
            in report
        )
        assert "kernel.unprivileged_userns_clone=1" in report


@pytest.mark.long
def test_a_home_on_tmpfs_without_programs(image_tar: Path) -> None:
    """Layers need attributes of users, which tmpfs has from Linux 6.6 on; the sandbox's init lies elsewhere than there."""
    host = 'mount -t tmpfs -o noexec,nosuid,nodev,mode=0755 tmpfs "/var/tmp"; mkdir -m 777 /var/tmp/state'
    with ordinary_users(ids=[True], host=host) as (user,):
        tar = Path("/tmp") / f"image-{user.id}.tar"
        tar.write_bytes(image_tar.read_bytes())
        try:
            script = (
                "set -e; umask 077; export HOME=/var/tmp/state XDG_RUNTIME_DIR=/var/tmp/state/run; mkdir $XDG_RUNTIME_DIR\n"
                'sd() { "$PYTHON" -m snapshotd "$@"; }\n'
                f"sd image import {tar} --name base >/dev/null\n"
                "line=$(sd create --image base); sd exec $line -- sh -c 'mkdir /w; echo x >/w/f'\n"
                "sd exec $line -- sh -c 'mv /w /v; cat /v/f'; sd daemon --stop\n"
            )
            assert user.run("sh", "-c", script, env={"PYTHON": interpreter()}).stdout == "x\n"
        finally:
            tar.unlink()
        user.nothing_left()


def test_a_tar_with_device_nodes(tmp_path: Path) -> None:
    """They are left out, and the warning says so."""
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as tar:
        node = tarfile.TarInfo("dev/null")
        node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, 3
        tar.addfile(node)
    with ordinary_users(ids=[True]) as (user,):
        done = user.run(interpreter(), "-m", "snapshotd", "image", "import", user.give(archive, "image.tar"))
        assert "a device node was left out" in done.stderr
        user("daemon", "--stop")
        user.nothing_left()


def test_a_machine_whose_apparmor_takes_the_rights_away() -> None:
    """As Ubuntu 24.04 is set up. The kernel here has no AppArmor: the setting is a file, and the refusal a chroot's."""
    kept = "cap_last_cap ngroups_max overflowgid overflowuid pid_max"
    host = (
        "mount --rbind / /mnt; mount -t tmpfs -o mode=0755 kernel /mnt/proc/sys/kernel\n"
        f'for name in {kept}; do cat "/proc/sys/kernel/$name" > "/mnt/proc/sys/kernel/$name"; done\n'
        "echo 1 > /mnt/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
    )
    with ordinary_users(ids=[True], host=host, chroot="/mnt") as (user,):
        assert "AppArmor takes the rights of user namespaces away here" in user.refused("ls")
        assert "kernel.apparmor_restrict_unprivileged_userns=0" in user("doctor", code=None)


_AT_HOME = """
set -e; umask 077; export HOME=/var/tmp/state XDG_RUNTIME_DIR="/dev/shm/sd-$(id -u)"; mkdir $XDG_RUNTIME_DIR
sd() { "$PYTHON" -m snapshotd "$@"; }
"""
_FILLED = """
sd image import %s --name base >/dev/null
line=$(sd create --image base)
sd exec $line -- sh -c 'echo kept >/workspace/kept'
sd exec $line -- sh -c 'cat /dev/zero >/workspace/big' 2>&1 || echo "code $?"
sd exec $line -- rm -f /workspace/big
sd exec $line -- cat /workspace/kept
sd check
sd daemon --stop
"""


@contextmanager
def at_home(kind: str) -> Iterator[OrdinaryUser]:
    """A user whose home is a file system of its own."""
    with ordinary_users(ids=[True], host=f'mount -t {kind} "/var/tmp"; mkdir -m 777 /var/tmp/state') as (user,):
        try:
            yield user
            user.nothing_left()
        finally:
            shutil.rmtree(f"/dev/shm/sd-{user.id}", ignore_errors=True)


@pytest.mark.long
def test_the_disk_of_a_home_is_full(small_tar: Path) -> None:
    with at_home("tmpfs -o size=128m,mode=0755 tmpfs") as user:
        tar = Path("/tmp") / f"image-{user.id}.tar"
        tar.write_bytes(small_tar.read_bytes())
        try:
            done = user.run("sh", "-c", _AT_HOME + _FILLED % tar, env={"PYTHON": interpreter()}, code=None)
        finally:
            tar.unlink()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "No space left on device" in done.stdout or "the disk is full" in done.stdout
        assert "kept\n" in done.stdout
        assert "0 damaged" in done.stdout


@pytest.mark.long
def test_a_home_without_extended_attributes() -> None:
    """As on NFS before 4.2: no layer could be kept there."""
    with at_home("ramfs -o mode=0755 ramfs") as user:
        script = _AT_HOME + "sd ls && exit 0; SNAPSHOTD_MODE=folder sd ls"
        done = user.run("sh", "-c", script, env={"PYTHON": interpreter()}, code=None)
        assert done.returncode != 0
        reason = "the file system of /var/tmp/state/.local/state/snapshotd/layers keeps no extended attributes of users"
        assert done.stderr.count(reason) == 2, done.stderr


@pytest.mark.long  # test_a_directory_of_sockets_that_is_another_users is refused, too
def test_without_a_place_for_the_sockets() -> None:
    """No XDG_RUNTIME_DIR, and a /tmp that only root writes to: doctor, and each command, say which setting helps."""
    with ordinary_users(ids=[True], host="mount -t tmpfs -o mode=755 none /tmp") as (found,):
        del found.env["XDG_RUNTIME_DIR"]
        place = f"/tmp/snapshotd-{found.id}"
        for command in (["daemon"], ["create"], ["create", "--isolation", "none"]):
            said = found.refused(*command)
            assert f"{place}, the place of the sockets, cannot be made" in said, said
            assert "Permission denied" in said, said
            assert "set XDG_RUNTIME_DIR to a directory of this user's own" in said, said
        (check,) = (one for one in json.loads(found("doctor", "--json", code=7)) if one["name"] == "sockets")
        assert (check["ok"], "/tmp is not writable" in check["detail"]) == (False, True)
        assert "XDG_RUNTIME_DIR" in check["fix"]
        other = found.home / "elsewhere"
        other.mkdir()
        os.chown(other, found.id, found.id)
        found.env["XDG_RUNTIME_DIR"] = str(other)
        checks = json.loads(found("doctor", "--json", code=None))
        assert [(one["ok"], one["detail"]) for one in checks if one["name"] == "sockets"] == [
            (True, f"{other}/snapshotd")
        ]


_ASYNCHRONOUS = """
import asyncio
from snapshotd.client.aio.client import AsyncSnapshotd

asyncio.run(AsyncSnapshotd(autostart=False).version())
"""
_LISTENER = """
import os, socket, sys, threading
def heard(listener):
    while True:
        connection = listener.accept()[0]
        print(connection.recv(1 << 16), flush=True)
        connection.close()
os.mkdir(sys.argv[1])
os.chmod(sys.argv[1], 0o755)
for name in ("snapshotd.sock", "hooks.sock"):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(sys.argv[1], name))
    os.chmod(os.path.join(sys.argv[1], name), 0o666)
    listener.listen()
    threading.Thread(target=heard, args=(listener,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_users_program_that_listens_at_the_daemons_place_is_told_nothing() -> None:
    """As in /tmp, where any user may have been first. The command sends neither a secret nor anything else."""
    with ordinary_users(2, ids=[False, False]) as (user, other):
        shared = user.home.parent / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        user.env["XDG_RUNTIME_DIR"] = str(shared)
        place = shared / "snapshotd"
        argv = other.command(interpreter(), "-c", _LISTENER, place)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
            try:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "ready\n"
                for command in (["run", "--secret", "KEY", "--isolation", "none", "--", "true"], ["ls"]):
                    said = user.refused(*command, env={"KEY": "the-secret"})
                    assert f"a program of user {other.id} listens at {place}/snapshotd.sock" in said, said
                    assert "nothing was sent" in said
                program = "from snapshotd.client.client import Snapshotd as S; S(autostart=False).version()"
                for made in (program, _ASYNCHRONOUS):
                    done = user.run(interpreter(), "-c", made, code=None)
                    assert "nothing was sent" in done.stderr, done.stderr
                dialled = user.run("sh", "-c", "echo the-secret | $0 -m snapshotd dial", interpreter(), code=None)
                assert "nothing was sent" in dialled.stderr
                hook = user.run(interpreter(), "-I", "-S", send.__file__, place / "hooks.sock", "hook", "claude")
                assert f"a program of user {other.id} listens at {place}/hooks.sock" in hook.stderr
            finally:
                heard = listener.communicate()[0]
            assert set(heard.split()) <= {"b''"}, heard


@pytest.mark.long  # test_a_directory_of_sockets_that_is_another_users is refused, too
def test_a_place_of_sockets_that_no_command_can_enter() -> None:
    """The user's own runtime directory with a mode that keeps its owner out, and a link to nothing: doctor, and each
    command, name what is in the way."""
    with ordinary_users(ids=[False]) as (user,):
        shut, link = user.home / "shut", user.home / "link"
        shut.mkdir()
        os.chown(shut, user.id, user.id)
        shut.chmod(0)
        link.symlink_to("/nonexistent")
        for place, reason in (
            (shut, f"the mode 0000 of {shut} keeps that user out, whose it is; give it the mode 0700"),
            (link, f"{link} is no directory: set XDG_RUNTIME_DIR"),
        ):
            user.env["XDG_RUNTIME_DIR"] = str(place)
            assert reason in user.refused("ls")
            (check,) = (one for one in json.loads(user("doctor", "--json", code=7)) if one["name"] == "sockets")
            assert not check["ok"]
            assert str(place) in check["detail"]


def test_doctor_advises_a_range_that_nobody_has() -> None:
    """Two users with the same ids could end each other's sandboxes."""
    with ordinary_users(ids=[False]) as (user,):
        (user._databases / "subuid").write_text("one:100000:65536\n")
        (user._databases / "subgid").write_text("one:100000:65536\ntwo:165536:65536\n")
        (check,) = (one for one in json.loads(user("doctor", "--json", code=None)) if one["name"] == "privileges")
        assert "--add-subuids 231072-296607 --add-subgids 231072-296607" in check["fix"]


@pytest.mark.long  # test_doctor_advises_a_range_that_nobody_has reads the same files
def test_doctor_warns_of_a_range_that_another_user_has_too() -> None:
    with ordinary_users(ids=[True]) as (user,):
        name, own, last = f"sd{user.id}", user.first, user.first + 65535

        def warning() -> dict[str, Any]:
            checks = json.loads(user("doctor", "--json", code=None))
            return next(one for one in checks if one["name"] == "privileges")

        for database in ("subuid", "subgid"):
            line = f"{name}:{own}:65536\n"
            (user._databases / database).write_text(f"{line}{user.id}:{own}:70000\none:{last + 1}:65536\n")
            assert warning()["ok"], "the user by number, and a range behind it"
            (user._databases / database).write_text(f"one:{own - 65536}:65536\ntwo:{last}:65536\n{line}")
            said = warning()
            assert said["ok"] is None
            shared = f"/etc/{database} gives ids of {name} {own}-{last} also to two {last}-{last + 65535})"
            assert shared in said["detail"], said
            free = f"{last + 65536}-{last + 131071}"
            asked = f"--del-subuids {own}-{last} --del-subgids {own}-{last} --add-subuids {free} --add-subgids {free}"
            assert f"`sudo usermod {asked} {name}`" in said["fix"], said
            (user._databases / database).write_text(line)


@pytest.mark.long  # the tour ends with nothing left
def test_the_documented_command_removes_what_belongs_to_the_range(small_tar: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/install.md").read_text()
    (words,) = (text for text in page.split("`") if text.endswith("rm -rf ~/.local/state/snapshotd"))
    with ordinary_users(ids=[True]) as (user,):
        user("image", "import", user.give(small_tar, "image.tar"), "--name", "base")
        line = user("create", "--image", "base").strip()
        user("exec", line, "--", "sh", "-c", "mkdir d; touch d/f; chmod 700 d")
        user("daemon", "--stop")
        user.run("sh", "-c", words)
        assert not user.state_dir.exists()
        user.nothing_left()
