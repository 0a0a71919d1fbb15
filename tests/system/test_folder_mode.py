"""Sandboxes without isolation, as an ordinary user has them who may make no namespaces and no mounts."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.kernel import landlock
from tests.capabilities import require
from tests.e2e.support import AGENT, alive, wait_until
from tests.ordinary import UID, Ordinary

pytestmark = pytest.mark.timeout(600)
RUN = ("run", "--isolation", "none", "--quiet")


@pytest.fixture(scope="module")
def user() -> Iterator[Ordinary]:
    require("root")
    folder = Path(tempfile.mkdtemp(prefix="snapshotd-ordinary-", dir="/var/tmp"))
    folder.chmod(0o755)
    found = Ordinary(folder)
    try:
        yield found
        found.stop_daemon()
        wait_until(lambda: found.processes() == [], "nothing runs on")
        assert list((folder / "run/snapshotd").iterdir()) == [], "nothing is left among the short-lived files"
    finally:
        found.close()


@pytest.mark.long  # unit/daemon has the choice of the mode
def test_without_the_word_it_is_refused(user: Ordinary) -> None:
    said = user("run", "--", "true", code=125).stderr
    assert "a user namespace cannot be made: Operation not permitted" in said
    assert "--isolation none" in said
    report = user("doctor", code=None).stdout
    assert (
        "folder: a sandbox is a plain folder, without isolation, and only where a command says --isolation none"
        in report
    )


def test_what_the_daemon_makes_is_the_users_alone(user: Ordinary) -> None:
    assert "a user namespace cannot be made" in user("ls", code=None).stderr, "no daemon starts without the word"
    user(*RUN, "--", "true")
    user("daemon", "--stop")
    user("ls")  # the state directory knows it now
    assert "--isolation none" in user("run", "--", "true", code=125).stderr
    for place in (user.state_dir, Path(user.env["XDG_RUNTIME_DIR"], "snapshotd")):
        assert (place.stat().st_uid, stat.S_IMODE(place.stat().st_mode)) == (UID, 0o700), place


@pytest.mark.long  # test_what_the_daemon_makes_is_the_users_alone
def test_a_part_of_its_state_that_the_daemon_may_not_use_is_named(user: Ordinary) -> None:
    user(*RUN, "--name", "closed", "--", "true")
    layers = user.state_dir / "layers"
    layers.chmod(0)
    try:
        said = user("fork", "closed", code=70).stderr
        assert f"user {UID}, who runs the daemon, may not use" in said
    finally:
        layers.chmod(0o700)
    user("daemon", "--stop")
    repository = user.state_dir / "repo"
    repository.chmod(0)
    try:
        said = user("ls", code=8).stderr
        assert f"the daemon cannot start: user {UID}, who runs the daemon, may not use '{repository}" in said
        assert "give what lies in the state directory back to that user with `chown` and `chmod u+rwX`" in said
    finally:
        repository.chmod(0o700)
    user.state_dir.chmod(0)
    try:
        assert f"the mode 0000 of its state directory keeps user {UID} out" in user("ls", code=9).stderr
    finally:
        user.state_dir.chmod(0o700)
    user("rm", "--force", "closed")


def test_the_tour(user: Ordinary) -> None:
    user.write("project/a.txt", "one\n")
    user.write("project/lib/m.py", "ANSWER = 42\n")
    user.write(
        "project/agent.py",
        AGENT
        + """
from lib.m import ANSWER
message("user", "go on")
shell("echo two >> a.txt; mkdir -p made/deep; echo deep > made/deep/f; ln made/deep/f made/g; ln -s a.txt link")
shell("rm lib/m.py; mv made moved; chmod 500 moved; touch -d 2001-02-03 a.txt")
print(ANSWER, os.getcwd().endswith("/workspace"), os.environ["HOME"] == os.environ["SNAPSHOTD_ROOT"] + "/home")
""",
    )
    ran = user(*RUN, "--name", "tour", "--workspace", "project", "project/agent.py")
    assert ran.stdout == "42 True True\n"
    log = user.json("log", "tour")
    assert [one["tool"]["name"] for one in log] == ["start", "shell", "shell", "exit"]
    start, first, second = (one["id"] for one in log[:3])
    assert user("diff", first, second).stdout.splitlines() == [
        "D /workspace/lib/m.py",
        "D /workspace/made/",
        "D /workspace/made/deep/",
        "D /workspace/made/deep/f",
        "D /workspace/made/g",
        "A /workspace/moved/",
        "A /workspace/moved/deep/",
        "A /workspace/moved/deep/f",
        "A /workspace/moved/g",
    ]
    assert user("cat", f"{first}:made/g").stdout == "deep\n"
    assert user("cat", f"{start}:a.txt").stdout == "one\n"
    assert "tour  finished" in user("tree").stdout
    # back in place, and forth
    shown = "stat -c '%n %s %Y %h %a' a.txt lib/* */g 2>/dev/null; cat a.txt"
    user("rewind", "--yes", "tour", first)
    before = user.listing("tour", shown)
    assert "made/g 5" in before
    assert "lib/m.py 12" in before
    assert "moved" not in before
    assert " 2 644\n" in before, "hard links stay links"
    user("rewind", "--yes", "tour", second)
    after = user.listing("tour", shown)
    assert "a.txt 8 981158400 1 644" in after, "times are part of a rewind"
    assert "moved/g 5" in after
    assert "lib/m.py" not in after
    # a fork has a directory of its own
    user("fork", first, "--name", "other")
    user.sh("other", "echo three >> a.txt")
    assert user.listing("other", "cat a.txt") == "one\ntwo\nthree\n"
    assert user.listing("tour", "cat a.txt") == "one\ntwo\n"
    assert user.listing("other", "echo $SNAPSHOTD_ROOT") != user.listing("tour", "echo $SNAPSHOTD_ROOT")
    # out of it
    user("restore", first, "--to", "out", "--path", "/workspace")
    assert (
        user.user("cat out/a.txt out/made/deep/f; readlink out/link; stat -c %h out/made/g")
        == "one\ntwo\ndeep\na.txt\n2\n"
    )
    user("export", first, "-o", "first.snap")
    user("check")
    user("rm", "--force", "other")
    user("rm", "--force", "tour")
    user("prune", "--force")
    user("import", "first.snap")
    assert user("cat", f"{first}:made/g").stdout == "deep\n"
    user("rm", "--force", first, code=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--network", "none"), "the network none"),
        (("--network", "bridge"), "the network bridge"),
        (("--network", "allow:pypi.org"), "the network allow:pypi.org"),
        (("--memory", "2g"), "a limit"),
        (("--pids", "64"), "a limit"),
        (("--disk", "1g"), "a limit"),
        (("--image", "minimal"), "an image"),
        (("--user", "root"), "another user"),
        (("--runtime", "runc"), "leave one of them out"),
    ],
)
def test_what_cannot_be_honest_is_refused(user: Ordinary, options: tuple[str, ...], said: str) -> None:
    assert said in user(*RUN, *options, "--", "true", code=125).stderr


def test_packages_of_an_agent_are_refused(user: Ordinary) -> None:
    user.write("own.py", "# /// script\n# dependencies = ['six']\n# ///\n")
    assert "Python packages of its own" in user(*RUN, "own.py", code=125).stderr


def test_a_known_agent_is_refused_before_it_is_installed(user: Ordinary) -> None:
    said = user(*RUN, "claude", code=125).stderr
    assert "a known agent's program needs a sandbox with isolation" in said
    assert "run --isolation none -- claude" in said
    assert not (user.home / ".cache/snapshotd/agents").exists()


def test_a_port_and_a_mount_are_refused_at_once_with_the_reason(user: Ordinary) -> None:
    box = user("create", "--isolation", "none").stdout.split()[0]
    assert "connect to 127.0.0.1:80" in user("port", box, "80", code=7).stderr
    user.user("mkdir empty")
    said = user("mount", "empty", code=7).stderr
    assert "only root's daemon" in said
    assert "`snapshotd cat`, `diff` and `restore`" in said
    user("rm", "--force", box)


def test_exit_codes_are_as_in_a_container(user: Ordinary) -> None:
    assert user(*RUN, "--", "sh", "-c", "exit 7", code=7)
    assert "no program no-such" in user(*RUN, "--", "no-such", code=127).stderr
    user.write("data/text", "no program\n")
    assert "cannot be run" in user(*RUN, "--workspace", "data", "--", "./text", code=126).stderr


@pytest.mark.skipif(
    landlock.version() < landlock.NEEDED, reason="this kernel has no Landlock that renames are made under"
)
def test_with_landlock_commands_write_in_their_folder_alone(user: Ordinary) -> None:
    box, _ = user.create("--isolation", "none")
    outside = user.home / "outside"
    script = (
        f"touch {outside} || echo refused; echo x > inside && mkdir d && mv inside d/ && cat d/inside; echo > /dev/null"
    )
    assert user.listing(box, script) == "refused\nx\n"
    assert not outside.exists()
    daemon = user.daemon_pid()
    if landlock.version() >= 6:
        assert "refused" in user.listing(box, f"kill -9 {daemon} || echo refused")
    assert alive(daemon)
    user("rm", "--force", box)


def test_what_runs_on_is_captured_and_ends_with_its_sandbox(user: Ordinary) -> None:
    box, _ = user.create("--isolation", "none")
    user.sh(box, "(while :; do date +%N >> log; sleep 0.01; done) < /dev/null > /dev/null 2>&1 & echo $! > pid")
    pid = int(user("cat", f"{box}:pid").stdout)
    wait_until(lambda: user("snapshot", box).returncode == 0 and user("cat", f"{box}:log").stdout != "", "it writes")
    assert "is live" in user("rewind", "--yes", box, user.json("log", box)[0]["id"], code=None).stderr
    assert alive(pid)
    user("stop", box)
    assert not alive(pid)
    user("rm", "--force", box)


def test_unreadable_files_and_directories_that_must_not_be_written(user: Ordinary) -> None:
    """As an ordinary user's: what must not be read gets the right to, what must not be written stays so and can go."""
    box, _ = user.create("--isolation", "none")
    user.sh(
        box,
        "echo secret > s; chmod 0 s; mkdir -p ro/in; echo x > ro/in/x; chmod 555 ro/in ro; mkdir shut; echo y > shut/y; chmod 0 shut",
    )
    first = user.json("show", box)["id"]
    assert user.listing(box, "stat -c %a s ro ro/in shut; cat s ro/in/x shut/y") == "400\n555\n555\n500\nsecret\nx\ny\n"
    user.sh(box, "chmod -R u+w ro; rm -r ro/in; echo z > ro/z; chmod 555 ro; rm -f s")
    user("stop", box)
    user("rewind", "--yes", box, first)
    assert (
        user.listing(box, "stat -c %a s ro ro/in shut; cat s ro/in/x shut/y; ls ro")
        == "400\n555\n555\n500\nsecret\nx\ny\nin\n"
    )
    user("rm", "--force", box)


def test_a_killed_daemon_takes_the_agent_along_and_resume_goes_on(user: Ordinary) -> None:
    script = ["shell('echo one >> log')", f"shell('[ -e {user.home}/go ] || sleep 1000')", "shell('echo two >> log')"]
    user.write("slow.py", AGENT + "\n".join(script))
    process = user.start("run", "--isolation", "none", "--quiet", "--name", "slow", "slow.py")
    wait_until(lambda: any("sleep 1000" in line for _, line in user.processes()), "the second call waits")
    doomed = [
        pid for pid, line in user.processes() if "sleep 1000" in line or ("slow.py" in line and "run" not in line)
    ]
    place = os.readlink(f"/proc/{doomed[0]}/cwd")
    os.kill(user.daemon_pid(), signal.SIGKILL)
    wait_until(lambda: not any(map(alive, doomed)), "what the daemon ran ends with it")
    process.communicate(timeout=120)
    assert next(one for one in user.json("ls") if one["name"] == "slow")["status"] == "interrupted"
    user.write("go", "")
    user("resume", "--quiet", "slow")
    assert [one["tool"]["name"] for one in user.json("log", "slow")].count("shell") == 3
    assert user("cat", "slow:log").stdout == "one\ntwo\n"
    assert place.endswith("/workspace")
    user("rm", "--force", "slow")


def test_a_first_process_that_is_killed_from_inside_leaves_nothing(user: Ordinary) -> None:
    box, _ = user.create("--isolation", "none")
    user.sh(box, "setsid sleep 1001 < /dev/null > /dev/null 2>&1 & echo")
    (first,) = (one["pid"] for one in user.json("ps") if one["trajectory"] == box)
    os.kill(first, signal.SIGKILL)
    user.sh(box, "echo again > here")
    assert not any("sleep 1001" in line for _, line in user.processes())
    user("rm", "--force", box)


@pytest.mark.long  # the setting: unit/test_config.py
def test_the_setting_makes_it_the_default(user: Ordinary) -> None:
    user.stop_daemon()
    user.env["SNAPSHOTD_MODE"] = "folder"
    try:
        assert user("run", "--quiet", "--", "sh", "-c", "basename $PWD").stdout == "workspace\n"
        assert "no containers" in user("run", "--runtime", "runc", "--", "true", code=125).stderr
        assert "a known agent's program" in user("run", "claude", code=125).stderr
        user.stop_daemon()
    finally:
        del user.env["SNAPSHOTD_MODE"]
