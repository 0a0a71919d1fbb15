"""Runtime contract: how commands start, what they get, what they return."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotd.errors import CommandNotFound, CommandNotRunnable, SnapshotdError, UsageError
from snapshotd.kernel.holding import cgroup
from snapshotd.runtime.base import DEFAULT_PATH
from tests.contracts.runtime_rig import (
    DEADLINE_S,
    Output,
    Rig,
    dead_helpers,
    eventually,
    expect,
    members,
    read_all,
    read_lines,
)


def check_exit_codes(rig: Rig) -> None:
    with rig.used_container() as container:
        for code in (0, 1, 77, 126, 127, 255):
            assert rig.run(container, "sh", "-c", f"exit {code}").code == code
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV):
            assert rig.run(container, "sh", "-c", f"kill -{int(number)} $$").code == 128 + number


def check_streams(rig: Rig) -> None:
    """Separate, and byte for byte; standard input is empty."""
    with rig.used_container() as container:
        script = (
            "binmode STDOUT; print STDOUT map { chr } 0..255; binmode STDERR; print STDERR map { chr } reverse 0..255;"
        )
        output = rig.run(container, "perl", "-e", script)
        assert output == Output(0, bytes(range(256)), bytes(reversed(range(256))))
        assert rig.run(container, "cat") == Output(0, b"", b"")


def check_standard_input(rig: Rig) -> None:
    """A pipe for whoever asks for one, to its end, also under its name and for another user; nobody else has it
    open."""
    data = bytes(range(256)) * 200
    with rig.used_container() as container:
        for user, argv in ((0, ["cat"]), (1000, ["cat", "/dev/stdin"])):
            process = rig.start(container, *argv, stdin=True, user=user, group=user)
            assert process.stdin_fd is not None
            os.write(process.stdin_fd, data)
            os.close(process.stdin_fd)
            stdout, stderr = read_all([process.stdout_fd, process.stderr_fd])
            for fd in (process.stdout_fd, process.stderr_fd):
                os.close(fd)
            assert (process.wait(DEADLINE_S), stdout, stderr) == (0, data, b"")
        process = rig.start(container, "true", stdin=True)
        assert process.stdin_fd is not None
        assert process.wait(DEADLINE_S) == 0, "nothing was sent, and its input has not ended"
        try:
            os.write(process.stdin_fd, b"x")
        except BrokenPipeError:
            pass
        else:
            raise AssertionError("somebody else has the other end")
        for fd in (process.stdin_fd, process.stdout_fd, process.stderr_fd):
            os.close(fd)


def check_big_output(rig: Rig) -> None:
    size = 10 << 20
    with rig.used_container() as container:
        script = f"my $b = 'o' x {size}; my $e = 'e' x {size}; print STDOUT $b; print STDERR $e; exit 3"
        output = rig.run(container, "perl", "-e", script)
    assert (output.code, len(output.stdout), len(output.stderr)) == (3, size, size)
    assert (set(output.stdout), set(output.stderr)) == ({ord("o")}, {ord("e")})


def check_environment_is_complete(rig: Rig) -> None:
    env = {"PATH": DEFAULT_PATH, "HOME": "/x y", "EMPTY": "", "ODD": "a=b\n'\"$x ä", "LANG": "C.UTF-8"}
    with rig.used_container() as container:
        output = rig.run(container, "env", "-0", env=env)
    assert dict(item.split("=", 1) for item in output.stdout.decode().split("\0") if item) == env


def check_arguments_arrive(rig: Rig) -> None:
    arguments = ["", " ", "a b", "'\"\\$x", "ä\n", "-x", "x" * 100_000]
    with rig.used_container() as container:
        output = rig.run(container, "perl", "-e", 'print map { "$_\\0" } @ARGV', "--", *arguments)
    assert output.stdout.decode().split("\0")[:-1] == arguments


def check_directory_and_user(rig: Rig) -> None:
    with rig.used_container() as container:
        rig.shell(container, "mkdir -p /workspace/sub && chmod 755 /workspace")
        for user, group in ((0, 0), (1000, 1001)):
            text = rig.shell(container, "pwd; id -u; id -g", cwd="/workspace/sub", user=user, group=group)
            assert text == f"/workspace/sub\n{user}\n{group}\n"
        assert rig.run(container, "sh", "-c", "echo x > /workspace/theirs", user=1000, group=1000).code != 0
        assert rig.run(container, "sh", "-c", "echo x > /workspace/ours").code == 0


def check_output_devices_open(rig: Rig) -> None:
    """/dev/stdout and /dev/stderr can be opened again by the command's user, as scripts do."""
    with rig.used_container() as container:
        for user in (0, 1000):
            output = rig.run(
                container, "sh", "-c", "echo out > /dev/stdout; echo err > /dev/stderr", user=user, group=user
            )
            assert output == Output(0, b"out\n", b"err\n"), (user, output)


def check_commands_that_cannot_start(rig: Rig) -> None:
    with rig.used_container() as container:
        script = """mkdir -p /t/locked /t/dir; echo x > /t/file; printf '#!/no/such/interpreter\\n' > /t/script; chmod 755 /t/script;
            printf '\\177ELF broken' > /t/broken; chmod 755 /t/broken; chmod 700 /t/locked; chmod 755 /t;
            cp /bin/true /t/locked/x; : > /t/empty; chmod 755 /t/empty"""
        rig.shell(container, script)
        cases: list[tuple[Sequence[str], dict[str, object], type[SnapshotdError]]] = [
            (["no-such-program"], {}, CommandNotFound),
            (["/no/such/program"], {}, CommandNotFound),
            (["./relative"], {}, CommandNotFound),
            (["/t/file/x"], {}, CommandNotFound),
            (["sh", "-c", "true"], {"env": {"PATH": "/nowhere"}}, CommandNotFound),
            (["sh", "-c", "true"], {"cwd": "/no/such/directory"}, CommandNotFound),
            (["sh", "-c", "true"], {"cwd": "/t/file"}, CommandNotFound),
            (["/t/file"], {}, CommandNotRunnable),
            (["/t/dir"], {}, CommandNotRunnable),
            (["/t/script"], {}, CommandNotRunnable),
            (["/t/broken"], {}, CommandNotRunnable),
            (["/t/empty"], {}, CommandNotRunnable),
            (["true", "x" * 140_000], {}, CommandNotRunnable),
            (["/t/locked/x"], {"user": 1000, "group": 1000}, CommandNotRunnable),
            ([], {}, UsageError),
            (["sh"], {"cwd": "relative"}, UsageError),
            (["a\0b"], {}, UsageError),
            (["sh", "\udcff"], {}, UsageError),
            (["sh"], {"env": {"": "x"}}, UsageError),
            (["sh"], {"user": -1}, UsageError),
        ]
        for argv, options, error in cases:
            expect(error, lambda argv=argv, options=options: rig.start(container, *argv, **options), (argv, options))  # type: ignore[misc]
        assert rig.shell(container, "echo ok") == "ok\n"
    assert dead_helpers() == []


def check_background_child(rig: Rig) -> None:
    """A child that keeps the output open neither delays the exit code nor dies; what it writes later still arrives."""
    with rig.used_container() as container:
        script = "(while ! test -e /go; do sleep 0.02; done; echo late; echo late >&2; touch /done; exec sleep 1000) & echo early; exit 5"
        process = rig.start(container, "sh", "-c", script)
        try:
            assert process.wait(DEADLINE_S) == 5, "its child, which goes on until it is told, does not delay it"
            assert process.wait(0) == 5
            rig.shell(container, "touch /go; while ! test -e /done; do sleep 0.02; done")
            assert read_lines(process.stdout_fd, 2) == b"early\nlate\n"
            assert read_lines(process.stderr_fd, 1) == b"late\n"
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        assert "sleep" in rig.shell(container, "cat /proc/[0-9]*/comm")


def check_background_child_outlives_reader(rig: Rig) -> None:
    """Output that is written after the caller closed its end kills nobody who handles the error."""
    with rig.used_container() as container:
        script = (
            "(trap '' PIPE; while ! test -e /go; do sleep 0.02; done; echo late; touch /done; exec sleep 1000) & exit 0"
        )
        process = rig.start(container, "sh", "-c", script)
        assert process.wait(DEADLINE_S) == 0
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)
        rig.shell(container, "touch /go; while ! test -e /done; do sleep 0.02; done")


def check_wait_and_kill(rig: Rig) -> None:
    with rig.used_container() as container:
        process = rig.start(container, "sleep", "1000")
        try:
            assert process.wait(0) is None
            assert process.wait(0.05) is None
            eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "its program does not run")
            waiters = [ThreadPoolExecutor(1).submit(process.wait, DEADLINE_S) for _ in range(3)]
            process.kill()
            assert [waiter.result(DEADLINE_S) for waiter in waiters] == [137] * 3
            assert process.wait() == 137
            process.kill()
            assert read_all([process.stdout_fd, process.stderr_fd]) == [b"", b""]
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)


def check_parallel_commands(rig: Rig) -> None:
    with rig.used_container() as container, ThreadPoolExecutor(8) as pool:
        outputs = list(
            pool.map(lambda i: rig.run(container, "sh", "-c", f"echo {i}; echo e{i} >&2; exit {i}"), range(24))
        )
    assert outputs == [Output(i, b"%d\n" % i, b"e%d\n" % i) for i in range(24)]


def check_orphans_are_reaped(rig: Rig) -> None:
    with rig.used_container() as container:
        rig.shell(container, "for i in 1 2 3 4 5; do (sleep 0.01 &) ; done")
        eventually(lambda: len(members(container)) == 1, "orphans that ended are still there")


def check_command_enters_frozen_container(rig: Rig) -> None:
    """A command that is started while the container is frozen runs once it is thawed."""
    with rig.used_container() as container:
        frozen = cgroup.of_process(container.pid)
        rig.shell(container, "true")
        frozen.freeze()
        with ThreadPoolExecutor(1) as pool:
            output = pool.submit(rig.run, container, "echo", "ok")
            time.sleep(0.1)  # gives a wrong driver time to fail
            assert not output.done()
            frozen.thaw()
            assert output.result(DEADLINE_S) == Output(0, b"ok\n", b"")


def check_no_descriptor_leaks(rig: Rig) -> None:
    with rig.used_container() as container:

        def work() -> None:
            rig.run(container, "true")
            expect(CommandNotFound, lambda: rig.start(container, "no-such-program"), "missing program")

        work()
        _settle()
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(10):
            work()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "descriptors were leaked")
    assert not list((rig.work / "run" / container.id).glob("exec-*"))


def _settle() -> None:
    """Wait until threads that serve ended commands are gone."""
    eventually(
        lambda: not any(thread.name.startswith("exec-") for thread in threading.enumerate()), "threads of commands stay"
    )


CHECKS: tuple[Callable[[Rig], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)
