"""`RexRuntime`: a sandbox as SWE-ReX's runtime. Each command is one snapshot, and its answer names it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.utils.log import get_logger

from snapshotd.client import AsyncSandbox, AsyncSnapshotd, ExecResult
from snapshotd.errors import CommandNotFound, CommandNotRunnable, NotFound, SnapshotdError
from snapshotd.integrations.swe_rex.shells import STATE, Dialogue, in_shell, state_of

_MERGED = 'exec "$@" 2>&1'
_INTERRUPT = "\x03"


class RexObservation(BashObservation):
    """SWE-ReX's observation, with the snapshot that holds all that the command did; None while its program runs on."""

    snapshot: str | None = None


class RexResponse(CommandResponse):
    """SWE-ReX's response, with the snapshot that holds all that the command did."""

    snapshot: str | None = None


class RexRuntime(AbstractRuntime):
    """Errors are SWE-ReX's own; `SwerexException` where the daemon or the sandbox fails."""

    def __init__(self, client: AsyncSnapshotd, box: AsyncSandbox, *, user: str | None = None) -> None:
        """`user` runs the commands; else root."""
        self.logger = get_logger("rex-runtime")
        self.box, self._client, self._user = box, client, user
        self._shells: dict[str, Dialogue | None] = {}
        """By their names, each with the program that it is just talking to."""

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Say whether the sandbox runs."""
        try:
            async with asyncio.timeout(timeout):
                status = (await self.box.info).status
        except TimeoutError:
            return IsAliveResponse(is_alive=False, message=f"the daemon did not answer within {timeout} s")
        except SnapshotdError as exc:
            return IsAliveResponse(is_alive=False, message=exc.message)
        return IsAliveResponse(is_alive=status == "running", message=f"the sandbox is {status}")

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Open a shell. In the fork of a snapshot it goes on as the shell of this name was there. SessionExistsError."""
        if request.session in self._shells:
            raise SessionExistsError(f"session {request.session} already exists")
        await self._exec(["mkdir", "-p", "-m", "1777", STATE], None)
        self._shells[request.session] = None
        sources = "; ".join(f"source {path}" for path in request.startup_source)
        done = await self._exec(_with_merged_output(in_shell(request.session, sources, "")), None) if sources else None
        return CreateBashSessionResponse(output=done.stdout if done is not None else "")

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> RexObservation:
        """Run a command in a shell, or say something to the program that it talks to. A command that takes too long is ended
        with all that it started; such a program goes on. SessionDoesNotExistError, CommandTimeoutError,
        NonZeroExitCodeError, BashIncorrectSyntaxError."""
        talk = self._shell(action.session)
        if isinstance(action, BashInterruptAction):
            if talk is not None:
                talk.type(_INTERRUPT)
                return await self._listen(action, talk, action.timeout)
            return RexObservation(exit_code=0)  # a command that took too long has been ended already
        if talk is not None:
            talk.type(f"{action.command.rstrip()}\n")
            return await self._listen(action, talk, action.timeout)
        token = secrets.token_hex(8)
        words = in_shell(action.session, action.command, token)
        if action.is_interactive_command or action.is_interactive_quit:
            talk = self._shells[action.session] = Dialogue(self._client, self.box.id, words, self._user)
            return await self._listen(action, talk, action.timeout)
        done = await self._exec(_with_merged_output(words), action.timeout, action.command)
        if done.stdout.startswith(token):
            said = done.stdout.removeprefix(token)
            raise BashIncorrectSyntaxError(said, extra_info={"bash_stdout": "", "bash_stderr": said})
        if action.check == "raise" and done.exit_code != 0:
            raise NonZeroExitCodeError(_failure(action, done.exit_code, done.stdout))
        code = None if action.check == "ignore" else done.exit_code
        return RexObservation(output=done.stdout, exit_code=code, snapshot=done.snapshot_id)

    async def close_session(self, request: CloseBashSessionRequest) -> CloseBashSessionResponse:
        """Close a shell: another one of this name begins anew. SessionDoesNotExistError."""
        talk = self._shell(request.session)
        if talk is not None:
            await talk.end()
        del self._shells[request.session]
        await self._exec(["rm", "-f", state_of(request.session)], None)
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> RexResponse:
        """Run a command by itself. CommandTimeoutError, NonZeroExitCodeError; FileNotFoundError: there is no such program."""
        words = ["/bin/sh", "-c", str(command.command)] if command.shell else command.command
        words = [words] if isinstance(words, str) else words
        done = await self._exec(
            _with_merged_output(words) if command.merge_output_streams else words,
            command.timeout,
            command.command,
            cwd=command.cwd,
            env=command.env,
        )
        if command.check and done.exit_code != 0:
            raise NonZeroExitCodeError(_failure(command, done.exit_code, done.stdout + done.stderr))
        return RexResponse(stdout=done.stdout, stderr=done.stderr, exit_code=done.exit_code, snapshot=done.snapshot_id)

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """The text of a file. FileNotFoundError."""
        with _failing():
            try:
                content = await self.box.files.read(request.path)
            except NotFound as exc:
                raise FileNotFoundError(f"{request.path}: {exc.message}") from exc
        return ReadFileResponse(content=content.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a file, whole or not at all; the directories that it needs are made."""
        with _failing():
            await self.box.files.write(request.path, request.content, user=self._user)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or a folder of this machine into the sandbox. ValueError: there is none."""
        if not Path(request.source_path).exists():
            raise ValueError(f"source path {request.source_path} is no file or directory of this machine")
        with _failing():
            await self.box.files.upload(request.source_path, request.target_path, user=self._user)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """Close all shells; their states stay in the snapshots."""
        for talk in self._shells.values():
            if talk is not None:
                await talk.end()
        self._shells.clear()
        return CloseResponse()

    def _shell(self, name: str) -> Dialogue | None:
        if name not in self._shells:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._shells[name]

    async def _listen(
        self, action: BashAction | BashInterruptAction, talk: Dialogue, timeout: float | None
    ) -> RexObservation:
        try:
            with _failing():
                said, expected = await talk.listen(action.expect, timeout)
        except TimeoutError as exc:
            raise CommandTimeoutError(f"timeout after {timeout} seconds while talking to a program") from exc
        except SwerexException:
            self._shells[action.session] = None
            raise
        done = talk.result
        if done is None:
            return RexObservation(output=said, exit_code=0, expect_string=expected)
        self._shells[action.session] = None
        if isinstance(action, BashAction) and action.check == "raise" and done.exit_code != 0:
            raise NonZeroExitCodeError(_failure(action, done.exit_code, said))
        snapshot = None if done.snapshot is None else done.snapshot.id
        return RexObservation(output=said, exit_code=done.exit_code, expect_string=expected, snapshot=snapshot)

    async def _exec(self, words: list[str], timeout: float | None, shown: object = "", **more: Any) -> ExecResult:
        try:
            with _failing():
                done = await self.box.exec(words, user=self._user, timeout=timeout, **more)
        except (CommandNotFound, CommandNotRunnable) as exc:
            raise FileNotFoundError(exc.message) from exc
        if done.timed_out:
            raise CommandTimeoutError(f"timeout after {timeout} seconds while running command {shown!r}")
        return done


@contextmanager
def _failing() -> Iterator[None]:
    """An error of the daemon is SWE-ReX's."""
    try:
        yield
    except (CommandNotFound, CommandNotRunnable):
        raise
    except SnapshotdError as exc:
        raise SwerexException(exc.message) from exc


def _with_merged_output(words: list[str]) -> list[str]:
    return ["/bin/sh", "-c", _MERGED, "sh", *words]


def _failure(command: BashAction | Command, code: int | None, said: str) -> str:
    failure = f"Command {command.command!r} failed with exit code {code}. Here is the output:\n{said!r}"
    return f"{command.error_msg}: {failure}" if command.error_msg else failure
