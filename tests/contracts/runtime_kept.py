"""Runtime contract: commands that outlive the daemon, and containers of an earlier one.

That the keeper outlives the daemon which started it is tested where daemons are killed; here it is another process,
whatever happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotd.errors import CommandNotFound, CommandNotRunnable, SandboxFailed
from snapshotd.runtime.base import STDIN, Process
from snapshotd.types import ContainerID, new_id
from tests.contracts.runtime_rig import DEADLINE_S, Rig, eventually, expect, members, read_all, read_lines


def _close(*processes: Process) -> None:
    for process in processes:
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def _parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("PPid:")))


def check_kept_command(rig: Rig) -> None:
    """It is somebody else's child; output, exit code and the command itself can be had again under its key, before and
    after its end."""
    with rig.used_container() as container:
        script = "echo out; echo err >&2; while ! test -e /go; do sleep 0.02; done; echo more; exit 7"
        process = rig.start_kept(container, "one", "sh", "-c", script)
        assert _parent_of(process.pid) != os.getpid()
        assert rig.keeper.keys() == {"one"}
        assert rig.keeper.open_held("one") is None
        assert (read_lines(process.stdout_fd, 1), read_lines(process.stderr_fd, 1)) == (b"out\n", b"err\n")
        assert process.wait(0) is None
        again = rig.keeper.process("one")
        assert again is not None
        assert again.pid == process.pid
        assert again.wait(0) is None
        rig.shell(container, "touch /go")
        assert (again.wait(DEADLINE_S), process.wait(DEADLINE_S)) == (7, 7)
        assert read_all([again.stdout_fd]) == [b"more\n"]
        ended = rig.keeper.process("one")
        assert ended is not None
        assert ended.wait() == 7
        rig.keeper.drop("one")
        assert rig.keeper.process("one") is None
        assert process.wait(0) == 7
        rig.keeper.drop("one")
        _close(process, again, ended)


def check_kept_input(rig: Rig) -> None:
    """The end of its input to write to is held under its key, and can be had again; its end is when all are closed."""
    with rig.used_container() as container:
        process = rig.start_kept(container, "fed", "sh", "-c", "cat; echo end; exit 3", stdin=True)
        assert process.stdin_fd is None
        assert rig.keeper.keys() == {"fed", "fed" + STDIN}
        for word in (b"one\n", b"two\n"):
            held = rig.keeper.open_held("fed" + STDIN)
            assert held is not None
            os.write(held, word)
            os.close(held)
            assert read_lines(process.stdout_fd, 1) == word
        assert process.wait(0) is None
        rig.keeper.drop("fed" + STDIN)
        assert process.wait(DEADLINE_S) == 3
        assert read_all([process.stdout_fd]) == [b"end\n"]
        rig.keeper.drop("fed")
        _close(process)
        expect(
            CommandNotFound,
            lambda: rig.start_kept(container, "none", "no-such-program", stdin=True),
            "a missing program",
        )
        assert rig.keeper.keys() == set(), "nothing of it is held"


def check_kept_exit_codes(rig: Rig) -> None:
    """Commands that end before anybody can look, and by signals; all at the same time."""
    wanted = {f"exit {code}": code for code in (0, 1, 127, 255)} | {
        f"kill -{n} $$": 128 + n for n in (signal.SIGKILL, signal.SIGTERM)
    }
    with rig.used_container() as container, ThreadPoolExecutor(4) as pool:
        processes = list(pool.map(lambda script: rig.start_kept(container, script, "sh", "-c", script), wanted))
        assert [process.wait(DEADLINE_S) for process in processes] == list(wanted.values())
        for key in wanted:
            rig.keeper.drop(key)
        assert read_all([process.stdout_fd for process in processes]) == [b""] * len(wanted)
        _close(*processes)
        eventually(lambda: len(members(container)) == 1, "commands that ended are still there")


def check_kept_commands_that_cannot_start(rig: Rig) -> None:
    """The same errors as for any command, and nothing is kept."""
    with rig.used_container() as container:
        rig.shell(container, "echo x > /file; printf '#!/no/such/interpreter\\n' > /script; chmod 755 /script")
        for argv, options, error in (
            (["no-such-program"], {}, CommandNotFound),
            (["sh"], {"cwd": "/no/such/directory"}, CommandNotFound),
            (["/file"], {}, CommandNotRunnable),
            (["/script"], {}, CommandNotRunnable),
        ):
            for _ in range(3):
                expect(
                    error, lambda argv=argv, options=options: rig.start_kept(container, "key", *argv, **options), argv
                )  # type: ignore[misc]
            assert rig.keeper.keys() == set(), argv
        eventually(lambda: len(members(container)) == 1, "what did not start is still there")


def check_one_command_per_key(rig: Rig) -> None:
    with rig.used_container() as container:
        first = rig.start_kept(container, "key", "sleep", "1000")
        expect(SandboxFailed, lambda: rig.start_kept(container, "key", "true"), "a second command under the key")
        first.kill()
        assert first.wait(DEADLINE_S) == 137
        second = rig.start_kept(container, "key", "sh", "-c", "exit 3")
        assert (second.wait(DEADLINE_S), first.wait(0)) == (3, 137)
        rig.keeper.drop("key")
        _close(first, second)


def check_destroy_ends_kept_commands(rig: Rig) -> None:
    """Whether or not anybody waits for them; their exit codes stay until they are dropped."""
    with rig.container() as container:
        waited = rig.start_kept(container, "waited", "sleep", "1000")
        silent = rig.start_kept(container, "silent", "sh", "-c", "trap '' TERM INT HUP; sleep 1000 & sleep 1000")
        _close(silent)
        dropped = rig.start_kept(container, "dropped", "sleep", "1000")
        rig.keeper.drop("dropped")
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(waited.wait, DEADLINE_S)
            rig.runtime.destroy(container.id)
            assert waiter.result(DEADLINE_S) == 137
        assert dropped.wait(DEADLINE_S) == 137
        assert rig.keeper.keys() == {"waited", "silent"}
        again = rig.keeper.process("silent")
        assert again is not None
        assert again.wait(DEADLINE_S) == 137
        assert read_all([waited.stdout_fd, waited.stderr_fd]) == [b"", b""]
        for key in ("waited", "silent"):
            rig.keeper.drop(key)
        _close(waited, dropped, again)


def check_attach(rig: Rig) -> None:
    """By its id alone, also twice, and to a container of one's own; what is gone or never was is not attached."""
    assert rig.runtime.attach(ContainerID(new_id())) is None
    with rig.container() as container:
        assert rig.runtime.attach(container.id) == container
        assert rig.runtime.attach(container.id) == container
        assert rig.shell(container, "echo ok") == "ok\n"
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: rig.runtime.attach(container.id) is None, "a dead container is attached")
        rig.runtime.destroy(container.id)
        assert rig.runtime.attach(container.id) is None


CHECKS: tuple[Callable[[Rig], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)
