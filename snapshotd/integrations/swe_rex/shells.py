"""The shells of a runtime. The state of a shell between two commands (variables, functions, the directory) is a file of the
sandbox, so each snapshot has it. A program that is talked to has a terminal, and no snapshot until it has ended."""

from __future__ import annotations

import asyncio
import re

from snapshotd.api.commands import ExecInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.feeding import AsyncTerminal
from snapshotd.integrations.typed_keys import TypedKeys

STATE = "/var/tmp/.swe-rex"
_ESCAPES = re.compile(r"\x1B(?:\[[0-?]*[ -/]*[@-~]|[@-_])")
_SHELL = r"""
if ! __said=$(bash -n -c "$2" 2>&1); then printf '%s%s' "$3" "$__said"; exit 2; fi
shopt -s expand_aliases
[ -f "$1" ] && . "$1" 2>/dev/null
unset __said
__keep() {
    code=$?
    { declare -p; declare -f; declare -fx; alias -p; shopt -p; set +o; umask -p; printf 'cd %q\n' "$PWD"; } 2>/dev/null > "$1.new" &&
        mv -f "$1.new" "$1"
    exit "$code"
}
trap "$(printf '__keep %q' "$1")" EXIT
eval "set --
$2"
"""
"""A command of a shell: its file, the command, and what its output begins with if that is no bash. The file is changed when
the command has ended, whole or not at all."""


def in_shell(name: str, command: str, token: str) -> list[str]:
    """The words that run a command in the shell of this name. Its output begins with `token` if the command is no bash; then
    nothing was run."""
    return ["bash", "-c", _SHELL, "bash", state_of(name), command, token]


def state_of(name: str) -> str:
    """The file with the state of the shell of this name."""
    return f"{STATE}/{re.sub(r'[^A-Za-z0-9-]', lambda found: f'_{ord(found[0]):x}', name)}"


class Dialogue:
    """A program in a terminal, to which lines are typed until it ends. Errors: those of the daemon."""

    def __init__(self, client: AsyncSnapshotd, sandbox: str, words: list[str], user: str | None) -> None:
        """Start the program at once."""
        self._keys, self._said, self._news = TypedKeys(), "", asyncio.Event()
        self._echo = ""
        self._task = asyncio.create_task(self._run(client, sandbox, words, user))

    @property
    def result(self) -> ExecInfo | None:
        """The result of the program; None: it runs."""
        return self._task.result() if self._task.done() else None

    async def _run(self, client: AsyncSnapshotd, sandbox: str, words: list[str], user: str | None) -> ExecInfo:
        try:
            return await client.exec(
                sandbox,
                words,
                user=user,
                env={"TERM": "dumb"},
                stdin=self._keys,
                on_output=lambda _, data: self._hear(data),
                terminal=AsyncTerminal(),
            )
        finally:
            self._news.set()

    def _hear(self, data: bytes) -> None:
        self._said += _ESCAPES.sub("", data.decode(errors="backslashreplace")).replace("\r\n", "\n")
        self._news.set()

    def type(self, text: str) -> None:
        """Type this into its terminal. Its echo is no part of what the program says."""
        self._echo = text
        self._keys.put(text.encode())

    async def listen(self, expected: list[str], timeout_s: float | None) -> tuple[str, str]:
        """Its words up to one of these texts, and that text; "" if it has ended. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                self._news.clear()
                if self._echo and self._said.startswith(self._echo):
                    self._said, self._echo = self._said.removeprefix(self._echo), ""
                found = [(at, one) for one in expected if (at := self._said.find(one)) >= 0]
                if found:
                    at, one = min(found)
                    said, self._said = self._said[:at], self._said[at + len(one) :]
                    return said, one
                if self._task.done():
                    self._task.result()
                    said, self._said = self._said, ""
                    return said, ""
                await self._news.wait()

    async def end(self) -> None:
        """End the program with all that it has started, and wait for its end."""
        self._task.cancel()
        self._keys.end()
        await asyncio.gather(self._task, return_exceptions=True)
