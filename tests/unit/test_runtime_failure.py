"""What runc says when a command does not start, as recorded from runc 1.1.5, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapshotd.errors import CommandNotFound, CommandNotRunnable, SandboxFailed, SnapshotdError
from snapshotd.runtime import failure

PREFIX = "exec failed: unable to start container process: "


@pytest.mark.parametrize(
    ("reason", "program", "error"),
    [
        (PREFIX + 'exec: "no-such-program": executable file not found in $PATH', "no-such-program", CommandNotFound),
        (PREFIX + 'exec: "": executable file not found in $PATH', "", CommandNotFound),
        (PREFIX + 'exec: "/no/such": stat /no/such: no such file or directory', "/no/such", CommandNotFound),
        (PREFIX + 'exec: "/t/file/x": stat /t/file/x: not a directory', "/t/file/x", CommandNotFound),
        (PREFIX + 'exec: "/xxxx": stat /xxxx: file name too long', "/xxxx", CommandNotFound),
        (PREFIX + 'chdir to cwd ("/no") set in config.json failed: no such file or directory', "true", CommandNotFound),
        (PREFIX + 'chdir to cwd ("/t/file") set in config.json failed: not a directory', "true", CommandNotFound),
        (PREFIX + 'chdir to cwd ("/root") set in config.json failed: permission denied', "true", CommandNotRunnable),
        (
            PREFIX + 'chdir to cwd ("/t") set in config.json failed: software caused connection abort',
            "true",
            SandboxFailed,
        ),
        (PREFIX + 'exec: "/t/file": permission denied', "/t/file", CommandNotRunnable),
        (PREFIX + 'exec: "/t/loop": stat /t/loop: too many levels of symbolic links', "/t/loop", CommandNotRunnable),
        ("exec /t/script: no such file or directory", "/t/script", CommandNotRunnable),
        ("exec ./script: no such file or directory", "./script", CommandNotRunnable),
        ("exec /t/a b/script: no such file or directory", "/t/a b/script", CommandNotRunnable),
        (PREFIX + "exec /t/script: no such file or directory", "/t/script", CommandNotRunnable),
        ("exec /t/broken: exec format error", "/t/broken", CommandNotRunnable),
        ("exec /usr/bin/true: argument list too long", "true", CommandNotRunnable),
        ("exec /t/x: permission denied", "/t/x", CommandNotRunnable),
        (PREFIX + "unable to setup user: cannot set uid to unmapped user in user namespace", "true", SandboxFailed),
        ("exec failed: cannot exec in a stopped container", "true", SandboxFailed),
        ("container does not exist", "true", SandboxFailed),
        ("", "true", SandboxFailed),
        # The caller's own words must not decide: these programs are called like reasons.
        (
            PREFIX + 'exec: "permission denied": executable file not found in $PATH',
            "permission denied",
            CommandNotFound,
        ),
        (PREFIX + 'exec: ": exec /": stat : exec /: no such file or directory', ": exec /", CommandNotFound),
        ("container no such file or directory: does not exist", "no such file or directory", SandboxFailed),
    ],
)
def test_command_failure(reason: str, program: str, error: type[SnapshotdError]) -> None:
    answer = failure.command_failure(reason, program, "/work")
    assert type(answer) is error, answer
    assert "\n" not in answer.message


def test_arguments_that_are_too_long_are_told_from_a_file_that_cannot_be_run() -> None:
    for reason in ("exec /usr/bin/true: argument list too long", PREFIX + "exec /usr/bin/true: argument list too long"):
        answer = failure.command_failure(reason, "true", "/")
        assert type(answer) is CommandNotRunnable
        assert "128 KiB" in answer.message
        assert "2 MiB" in answer.message
        assert "mode and format" not in answer.message


def test_message_names_the_program_and_is_bounded() -> None:
    answer = failure.command_failure(
        PREFIX + 'exec: "x": executable file not found in $PATH', "p" * 10_000 + "\n\x1b[31m", "/"
    )
    assert "ppp" in answer.message
    assert len(answer.message) < 1000
    assert answer.message.isprintable()


def test_log_reason_is_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert failure.log_reason(log) == ""
    lines = [
        {"level": "warning", "msg": "unimportant", "time": "2024-01-01T00:00:00Z"},
        {"level": "error", "msg": "first"},
        {"level": "error", "msg": "the\nreason"},
        {"level": "info", "msg": "after"},
    ]
    log.write_text("\n".join(json.dumps(line) for line in lines))
    assert failure.log_reason(log) == "the reason"


@pytest.mark.parametrize(
    ("log", "reason"),
    [(b"", ""), (b"plain words", "plain words"), (b'[1]\n"x"\n', '[1] "x"'), (b"\xff\xfe", "\ufffd\ufffd")],
)
def test_log_reason_of_anything_else(tmp_path: Path, log: bytes, reason: str) -> None:
    (tmp_path / "log").write_bytes(log)
    assert failure.log_reason(tmp_path / "log") == reason


def test_shorten_keeps_both_ends() -> None:
    text = failure.shorten("begin" + "x" * 10_000 + "end")
    assert text.startswith("begin")
    assert text.endswith("end")
    assert len(text) <= 500


def test_a_container_that_ends_while_it_is_removed_is_removed_again() -> None:
    text = "Could not kill running container 2d787e, cannot remove - Container 2d787e is not running"
    assert failure.removal_may_work_again(500, text)
    assert failure.removal_may_work_again(409, "removal of container 2d787e is already in progress")
    assert not failure.removal_may_work_again(500, "driver failed to remove root filesystem: device or resource busy")
