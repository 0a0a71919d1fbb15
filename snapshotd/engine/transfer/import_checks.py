"""Checks the parts of a bundle's records that could later reach a program or a command line.

Errors: UsageError (malformed), LimitExceeded.
"""

from __future__ import annotations

from dataclasses import replace

from snapshotd.engine.storage import records
from snapshotd.errors import DataLoss, LimitExceeded, UsageError
from snapshotd.types import AgentSpec

_ENV_LIMIT, _TEXT_LIMIT_BYTES = 1000, 128 << 10
_USER_LIMIT_CHARS = 200


def read_record(data: bytes) -> records.Record:
    """A record of a bundle. VersionMismatch."""
    try:
        return records.decode(data)
    except DataLoss as exc:
        raise UsageError(f"the bundle is malformed: {exc.message.partition(': run ')[0]}") from exc


def check_text(text: str) -> str:
    """An absolute path that a program can be started in."""
    if "\0" in text or len(text) > 4095 or not text.startswith("/") or not _is_unicode(text):
        raise UsageError("the bundle is malformed: a working directory in it is not an absolute path")
    return text


def check_env(env: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """An environment that can be given to a program."""
    size = sum(len(name) + len(value) for name, value in env)
    if len(env) > _ENV_LIMIT or size > _TEXT_LIMIT_BYTES:
        raise LimitExceeded(
            f"an environment in the bundle has more than {_ENV_LIMIT} entries or {_TEXT_LIMIT_BYTES} characters"
        )
    for name, value in env:
        if not name or "=" in name or "\0" in name + value or not _is_unicode(name + value):
            raise UsageError("the bundle is malformed: an environment in it cannot be given to a program")
    return env


def check_agent(agent: AgentSpec | None) -> AgentSpec | None:
    """A program that could be run; an import does not run it."""
    if agent is None:
        return None
    text = "".join(agent.argv)
    if len(text) > _TEXT_LIMIT_BYTES:
        raise LimitExceeded(f"a command line in the bundle has more than {_TEXT_LIMIT_BYTES} characters")
    if not agent.argv or agent.program > len(agent.argv) or "\0" in text or not _is_unicode(text):
        raise UsageError("the bundle is malformed: a command line in it cannot be run")
    if agent.user is not None and not (len(agent.user) <= _USER_LIMIT_CHARS and agent.user.isprintable()):
        raise UsageError("the bundle is malformed: a user in it cannot be one")
    return replace(agent, cwd=check_text(agent.cwd), env=check_env(agent.env))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
