"""Services of sandboxes: declared, started again, taken away. Here over plain folders; tests/e2e/test_services.py has
isolation."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd import service as declarations
from snapshotd.client import Sandbox, ServiceOptions
from snapshotd.errors import CommandNotFound, Conflict, LimitExceeded, NotFound, SandboxFailed, Unsupported, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon

pytestmark = [pytest.mark.usefixtures("both_clients"), pytest.mark.same_verbs]

DECLARED = "/etc/snapshotd/services.toml"
COUNTING = "echo began >> starts; exec sleep 1000"
UP = "grep -q began starts"


@pytest.fixture
def box(shared_daemon: Daemon) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", client=shared_daemon.client)


def states(sandbox: Sandbox) -> dict[str, str]:
    """The newest state of each service."""
    return {str(one.info.service): str(one.info.service_state) for one in sandbox.commands() if one.info.service}


def starts(sandbox: Sandbox) -> int:
    return sandbox.exec("cat starts").stdout.count("began")


def declared_by(snapshot: object) -> str:
    data: bytes = snapshot.cat(DECLARED)  # type: ignore[attr-defined]
    return data.decode()


def test_it_comes_back_in_forks_rewinds_and_starts_of_later_snapshots(box: Sandbox) -> None:
    box.exec("echo note > note")
    before = box.head()
    command = box.exec(COUNTING, service=ServiceOptions("web", ready=UP))
    assert (command.info.service, command.info.service_state, command.info.status) == ("web", "ready", "running")
    declared = box.head()
    assert declared.info.tool.name == "service"
    assert declared.info.tool.arguments["service"] == "web"
    assert declarations.parse(declared_by(declared), "it")[0].name == "web"
    assert starts(box) == 1
    (fork,) = declared.fork()
    assert states(fork) == {"web": "ready"}
    eventually(lambda: starts(fork) == 2)
    (earlier,) = before.fork()
    assert states(earlier) == {}
    box.rewind(before)
    assert states(box) == {"web": "stopped"}
    box.undo()
    assert states(box) == {"web": "ready"}
    eventually(lambda: starts(box) == 2)
    box.stop()
    assert states(box) == {"web": "stopped"}
    eventually(lambda: starts(box) == 3)
    assert [one.info.tool.name for one in box.snapshots()].count("service") == 1, "its ends and starts leave none"


def test_it_runs_in_throw_away_forks(box: Sandbox, shared_daemon: Daemon) -> None:
    box.exec(COUNTING, service=ServiceOptions("web", ready=UP))
    head = box.head()
    done = shared_daemon.client.exec_snapshot(head.id, ["sh", "-c", "grep -c began starts > count; exit $(cat count)"])
    assert done.exit_code == 2
    box.command("web").remove()
    box.exec("test ! -e broken || exit 7; exec sleep 1000", service=ServiceOptions("web", ready="test ! -e broken"))
    box.exec("touch broken")
    with pytest.raises(SandboxFailed, match="nothing was run in the throw-away fork: the service web"):
        shared_daemon.client.exec_snapshot(box.head().id, ["true"])


def test_in_a_throw_away_fork_it_has_the_time_that_the_caller_allows(box: Sandbox, shared_daemon: Daemon) -> None:
    box.exec("exec sleep 1000", service=ServiceOptions("web", ready="test ! -e slow"))
    box.exec("touch slow")
    with pytest.raises(SandboxFailed, match=r"web of .* did not come back: it was not ready within the 0\.7 s"):
        shared_daemon.client.exec_snapshot(box.head().id, ["true"], timeout=0.7)


def test_one_that_does_not_get_ready_is_not_declared(box: Sandbox) -> None:
    head = box.head().id
    with pytest.raises(
        SandboxFailed, match=r"not ready within 0\.3 s \('echo not yet; false' fails\); it said: not yet"
    ):
        box.exec("exec sleep 1000", service=ServiceOptions("web", ready="echo not yet; false", ready_timeout_s=0.3))
    assert states(box) == {"web": "failed"}
    with pytest.raises(SandboxFailed, match=r"ended \(exit code 3\) before it was ready"):
        box.exec("exit 3", service=ServiceOptions("web", ready="false"))
    with pytest.raises(CommandNotFound):
        box.exec(["missing"], service="web")
    assert box.head().id == head
    box.exec("exec sleep 1000", service="web")
    assert states(box) == {"web": "ready"}


def test_one_that_does_not_come_back_leaves_a_sandbox_that_says_so(box: Sandbox) -> None:
    box.exec("test ! -e broken || exit 4; exec sleep 1000", service=ServiceOptions("web", ready="test ! -e broken"))
    box.exec("exec sleep 1000", service="other")
    box.exec("touch broken")
    (fork,) = box.head().fork()
    assert states(fork) == {"web": "failed", "other": "ready"}
    first, second = fork.exec("true"), fork.exec("true")
    assert "the service web of" in first.stderr
    assert "did not come back" in first.stderr
    assert second.stderr == "", "it is told once"


def test_a_required_one_keeps_the_sandbox_from_starting(box: Sandbox) -> None:
    whole = box.exec(
        "exec sleep 1000", service=ServiceOptions("web", ready="test ! -e broken", ready_timeout_s=0.3, required=True)
    )
    assert whole.info.service_state == "ready"
    box.exec("true")
    good = box.head()
    box.exec("touch broken")
    broken = box.head()
    with pytest.raises(SandboxFailed, match="without a service that is required: the service web"):
        broken.fork(2)
    box.stop()
    with pytest.raises(SandboxFailed, match="is required"):
        box.exec("true")
    assert box.info.status == "stopped"
    box.rewind(good)
    assert states(box) == {"web": "ready"}
    box.stop()
    box.rewind(broken)
    assert states(box) == {"web": "failed"}, "a rewind is made all the same"
    box.command("web").remove()
    assert box.exec("true").exit_code == 0


def test_it_is_taken_away_by_a_snapshot(box: Sandbox) -> None:
    box.exec("exec sleep 1000", service="web")
    box.exec("exec sleep 1000", service="other")
    with_both = box.head()
    box.stop()
    removed = box.command("web").remove()
    assert removed.info.tool.arguments == {"service": "web", "removed": True}
    assert states(box) == {"web": "stopped", "other": "ready"}
    (later,), (earlier,) = removed.fork(), with_both.fork()
    assert states(later) == {"other": "ready"}
    assert states(earlier) == {"web": "ready", "other": "ready"}
    with pytest.raises(NotFound, match="it has: other"):
        box.command("web").remove()
    with pytest.raises(UsageError, match="is no service"):
        box.exec("exec sleep 1000", background=True).remove()


def test_it_is_found_signalled_and_read_by_its_name(box: Sandbox) -> None:
    box.exec("echo hello; exec sleep 1000", service="web")
    command = box.command("web")
    eventually(lambda: list(command.lines()) == ["hello"])
    command.signal(15)
    eventually(lambda: states(box) == {"web": "failed"})
    assert box.command("web").info.exit_code == 143
    assert box.command("web").info.snapshot is None
    box.stop()
    box.exec("true")
    assert states(box) == {"web": "ready"}
    assert box.command("web").id != command.id


def test_it_is_started_again_as_often_as_it_says(box: Sandbox) -> None:
    box.exec("echo began >> starts; until test -e stop; do sleep 0.02; done", service=ServiceOptions("web", restarts=2))
    box.exec("touch stop")
    eventually(lambda: starts(box) == 3)
    eventually(lambda: states(box)["web"] in ("ended", "failed"))  # it may end before it counts as ready
    assert [one.info.restarts for one in box.commands()] == [0, 1, 2]


def test_what_it_has_left_running_is_ended_before_it_is_started_again(box: Sandbox) -> None:
    """The shell in front of a server was killed, and the server has its lock (or port) still."""
    server = "setsid flock lock sh -c 'echo began >> starts; exec sleep 1000' & wait"
    box.exec(server, service=ServiceOptions("web", ready="test -e starts", restarts=1))
    box.command("web").signal(15)
    eventually(lambda: starts(box) == 2)


def test_it_does_not_keep_a_sandbox_from_idling(box: Sandbox) -> None:
    box.exec("exec sleep 1000", service="web", idle_timeout=0.1)
    eventually(lambda: box.info.status == "stopped")
    assert states(box) == {"web": "stopped"}


def test_new_sandboxes_begin_with_those_of_a_file(shared_daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "services.toml"
    file.write_text(
        '[services.first]\ncommand = "touch first; exec sleep 1000"\nready = "test -e first"\n'
        '[services.second]\ncommand = ["sh", "-c", "cp first second; exec sleep 1000"]\nready = "test -e second"\n'
    )
    made = Sandbox.create(services=file, client=shared_daemon.client)
    assert states(made) == {"first": "ready", "second": "ready"}
    assert declared_by(made.head()) == file.read_text()
    ran = Sandbox.run(command=["sh", "-c", "test -e second"], services=file, client=shared_daemon.client)
    assert ran.exit_code == 0, "they are ready before the program begins"
    file.write_text('[services.web]\ncommand = "exit 1"\nready = "false"\n')
    with pytest.raises(SandboxFailed, match="the sandbox is not made: the service web"):
        Sandbox.create(name="never-made", services=file, client=shared_daemon.client)
    with pytest.raises(NotFound):
        Sandbox.connect("never-made", client=shared_daemon.client)


def test_what_cannot_be_a_service_is_refused(box: Sandbox) -> None:
    for options in ({"stdin": True}, {"timeout": 5.0}):
        with pytest.raises(UsageError, match="a service has no input and no timeout"):
            box.exec("true", service="web", **options)  # type: ignore[call-overload]
    for name in ("a/b", "-x", "8000", "abcd", "x" * 65):
        with pytest.raises(UsageError):
            box.exec("exec sleep 1000", service=name)
    with pytest.raises(Unsupported, match="plain folder"):
        box.exec("exec sleep 1000", service=ServiceOptions("web", port=8000))
    box.exec("exec sleep 1000", service="web")
    with pytest.raises(Conflict, match="has a service web already"):
        box.exec("exec sleep 2000", service="web")
    assert box.exec("exec sleep 1000", service="web").id == box.command("web").id, "the same once more changes nothing"
    for number in range(15):
        box.exec("exec sleep 1000", service=f"s{number}")
    with pytest.raises(LimitExceeded, match="16 services already"):
        box.exec("exec sleep 1000", service="more")


def test_a_sandbox_may_write_anything_there(box: Sandbox) -> None:
    place = 'mkdir -p "$SNAPSHOTD_ROOT/etc/snapshotd"; cd "$SNAPSHOTD_ROOT/etc/snapshotd"; rm -rf services.toml; '
    for hostile in (
        "echo '[services' > services.toml",
        "mkfifo services.toml",
        "ln -s /etc/shadow services.toml",
        "mkdir services.toml",
        "printf '\\377' > services.toml",
        "head -c 100000 /dev/zero > services.toml",
        "cd ..; rm -r snapshotd; ln -s snapshotd snapshotd",
    ):
        box.exec(place + hostile)
        (fork,) = box.head().fork()
        said = fork.exec("true").stderr
        assert "no service is started: /etc/snapshotd/services.toml" in said, hostile
        assert fork.exec("true").stderr == ""
