"""`python -m snapshotd.cli.reference` prints docs/cli.md: every command with its options and examples, from the
commands themselves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click

from snapshotd import errors
from snapshotd.api.record import ApiRecord, Request, types_of
from snapshotd.cli.command import CliCommand
from snapshotd.cli.main import cli
from snapshotd.daemon.http.describing import docstrings, find_records

_INTRODUCTION = """\
# Commands

Generated from the commands by `python -m snapshotd.cli.reference`; do not edit.

- Wherever a command takes an id, any unique prefix of it (four characters or more), a name or a tag will do.
- Data goes to standard output; progress and one line per snapshot go to standard error. `--json` prints JSON instead of text, and an
  error as `{"error":{"code","message"}}`. [The words of --json](#the-words-of---json) says what each word means.
- `--state-dir` (`SNAPSHOTD_STATE_DIR`) and `--socket` (`SNAPSHOTD_SOCKET`) may stand before or after the command's name.
- The first command that needs the daemon starts it, when run as root.
"""

_WORDS: dict[str, tuple[str, str]] = {
    # things and their names
    "id": ("id", "Of the thing itself: a trajectory, a snapshot, a call, an approval, an image, a background command"),
    "trajectory": ("id", "The trajectory that it belongs to, or that was made"),
    "trajectories": ("list of id", "Trajectories that were made"),
    "snapshot": ("id", "The snapshot that it belongs to, or that was made"),
    "snapshots": ("list of object", "Snapshots of a trajectory, as `log` has them"),
    "call": ("id", "A call, as `journal` lists it"),
    "experiment": ("text", "Name or id of the experiment that forks belong to"),
    "name": ("text", "What a thing is called: a trajectory, a tool, a task, a tag, an image, a variant"),
    "label": ("text", "Name of a variant"),
    "kind": (
        "text",
        "What sort of thing it is: `trajectory` or `snapshot`, `tool` or `model`, `file` or `directory`, ...",
    ),
    "ref": ("text", "A trajectory or snapshot as it was named in the command"),
    "image": ("id", "The image that a sandbox began with"),
    "image_name": ("text", "Its name, or its id where it has none"),
    "source": ("text", "Where something comes from: an image, a merge"),
    "key": ("text", "The name under which a value, a call or a bundle is found again"),
    "tenant": ("text", "Whose things they are"),
    "version": ("count", "Which version of a value it is"),
    # how they hang together
    "parent": ("id", "The snapshot that it came after"),
    "head": ("id", "The newest snapshot of a trajectory"),
    "target": ("id", "The snapshot that a rewind goes to"),
    "number": ("count", "Place of a call in a comparison, from 1"),
    "position": ("count", "Place of an entry in the journal"),
    # when
    "created_at": ("time", "When it was made"),
    "started_at": ("time", "When it began"),
    "ended_at": ("time", "When it ended"),
    "expires_at": ("time", "When it is over without an answer, or gone"),
    "seconds": ("number", "Time that it took"),
    "duration_ms": ("number", "Time that a call took"),
    "timeout_s": ("number", "Time after which a command is ended"),
    # how it is, and how it ended
    "status": ("text", "How far it is, or how it ended: `running`, `done`, `failed`, `interrupted`, ..."),
    "state": ("text", "Durability of a snapshot: `captured`, `stored`, `lost`, `pruned`"),
    "exit_code": ("count", "Exit code of a command or agent"),
    "error": ("text", "Why it failed"),
    "reason": ("text", "Why: of a decision, a conflict, a snapshot that loses its files or was left out"),
    "warnings": ("list of text", "What is not as it should be, one sentence each"),
    "note": ("text", "What is to be known besides"),
    "agent_running": ("bool", "An agent is at work in the sandbox"),
    "timed_out": ("bool", "The command took longer than its timeout, and was ended"),
    "tagged": ("bool", "The snapshot has the tag now"),
    "applied": ("bool", "The changes are in the folder now"),
    "saved": ("bool", "The cache has a new entry now"),
    "cache_hit": ("bool", "The cache had the very key"),
    "cache_key": ("text", "The key that the cache had"),
    "dry_run": ("bool", "Nothing was done: this is what would be"),
    "ok": ("bool", "The machine has what is needed; null is a warning"),
    "written": ("bool", "The settings were changed"),
    "installed": ("bool", "The settings have the hooks"),
    "heard": ("bool", "The daemon hears the hooks"),
    # calls
    "arguments": ("any", "What a call was given"),
    "argument": ("text", "The main argument of a call, as a table shows it"),
    "side_effect": ("text", "`local`, `idempotent` or `irreversible`"),
    "result": ("any", "What a call returned"),
    "argv": ("list of text", "A command and its arguments"),
    "cwd": ("text", "Working directory"),
    "details": ("any", "What is recorded of a call besides"),
    "stdout": ("text", "What a command printed"),
    "stderr": ("text", "What a command printed to standard error"),
    "stdout_b64": ("text", "The same in base64, where it is not UTF-8"),
    "stderr_b64": ("text", "The same in base64, where it is not UTF-8"),
    "stream": ("text", "`stdout` or `stderr`"),
    "data_b64": ("text", "A piece of output"),
    "shown_bytes": ("count", "Bytes of the stream up to the end of this piece"),
    "event": ("text", "What happened"),
    "reuse": ("map", "How many calls, and replies, of how many a run did not make again"),
    "messages": ("list of object", "Messages of a conversation"),
    # files
    "path": ("text", "Path in the sandbox, or in the folder"),
    "path_b64": ("text", "The same in base64, where it is not UTF-8"),
    "file": ("text", "Path of a file of this machine"),
    "changes": ("list of object", "Paths that differ"),
    "change": ("text", "`added`, `changed` or `deleted`"),
    "added": ("count", "How many paths were added"),
    "changed": ("count", "How many paths were changed"),
    "deleted": ("count", "How many paths were deleted"),
    "uid": ("count", "Owner of a file"),
    "gid": ("count", "Group of a file"),
    "size": ("count", "Bytes of a file"),
    "bytes": ("count", "Bytes in all"),
    "content_b64": ("text", "Content of a file"),
    "patch_b64": ("text", "A patch"),
    "outside": ("count", "How many changes lie outside of /workspace"),
    "commit": ("text", "Id of the git commit"),
    "directories": ("count", "How many directories"),
    "mounted": ("text", "The directory that shows the snapshots now"),
    "unmounted": ("text", "The directory that showed them"),
    # counts
    "snapshot_count": ("count", "How many snapshots"),
    "trajectory_count": ("count", "How many trajectories"),
    "image_count": ("count", "How many images"),
    "sandbox_count": ("count", "How many live sandboxes"),
    "tag_count": ("count", "How many tags"),
    "message_count": ("count", "How many messages"),
    "row_count": ("count", "How many rows, of a table or of a catalog"),
    "tables": ("list of object", "Tables of a catalog that was copied"),
    "sha256": ("text", "Hash of a table's rows"),
    "file_count": ("count", "How many files"),
    "call_count": ("count", "How many calls"),
    "checkpoints": ("count", "How many checkpoints were copied"),
    "matches": ("any", "Beginning and end of each match in the excerpt"),
    "began_at": ("time", "When something began: the daemon, a minute"),
    "disk": ("list of object", "Trajectories with what they take on disk"),
    "counts": ("list of count", "How many pauses in each class"),
    "sum_ms": ("number", "Durations added up"),
    # forks, comparisons, scores
    "branches": ("list of object", "Sides of a comparison, or branches of an experiment"),
    "unknown": ("list of id", "Snapshots where the command could not tell"),
    "tried": ("list of object", "Every run of the command"),
    "score": ("number", "The score, or the mean of the scores"),
    "runs": ("list of object", "Every run of a score"),
    "tests": ("map", "How many tests passed, failed, ..."),
    # sandboxes, storage, the daemon
    "runtime": ("text", "The container driver"),
    "network": ("text", "What a sandbox can reach"),
    "memory_bytes": ("count", "Most memory"),
    "cpus": ("number", "Most processors"),
    "pids": ("count", "Most processes"),
    "address": ("text", "Where a server of a sandbox can be reached"),
    "port": ("count", "Port in the sandbox"),
    "removed": ("list of text", "What was forgotten"),
    "policy": ("object", "The rules of which snapshots keep their files"),
    "keep_last": ("count", "The newest so many"),
    "keep_within_s": ("number", "Those not older than this"),
    "keep_every": ("count", "Every so manieth"),
    "keep_failed": ("count", "The newest so many of failed calls"),
    "max_bytes": ("count", "While the repository has more bytes, the oldest go"),
    "layer_bytes": ("count", "Disk use of layers"),
    "repository_bytes": ("count", "Disk use of the repository"),
    "left_out": ("list of object", "Snapshots that could not be brought back"),
    "agents": ("list of object", "The agents that have hooks"),
    "detail": ("text", "What was found on this machine"),
    "fix": ("text", "What to do about it"),
    "pid": ("count", "A process of this machine"),
    "stopped": ("count", "Process of the daemon that ended"),
    "started": ("count", "Process of the daemon that began"),
    "client_version": ("text", "Of the program that runs"),
    "daemon_version": ("text", "Of the daemon"),
    "instance": ("text", "What the containers of this daemon are called by"),
    "weaker": ("text", "Ways in which sandboxes are weaker than in the best mode; empty: in none"),
    "layer_kind": ("text", "How layers are kept"),
    "free_bytes": ("count", "Room on the disk"),
    "free_memory_bytes": ("count", "Room in memory"),
    "processor_count": ("count", "Processors that sandboxes share"),
    "runtimes": ("map", "Container driver to `available`, or why it is not"),
    "policy_file": ("text", "Where the rules of approvals are"),
    "durability": ("text", "`ok`, or why nothing is stored at the moment"),
    "settings": ("map", "Variable of the environment to its value"),
    "listening": ("text", "Where other machines reach the daemon; empty: none does"),
    "fingerprint": ("text", "Of the certificate that it shows them"),
    "token_id": ("text", "A token, by the part of it that is no secret"),
    "from": ("text", "Address that was copied from"),
    "to": ("text", "Address that was copied to"),
}
"""Words that no record of the API describes, or several in ways of their own: each with its type and meaning."""
_IDS = {
    "base",
    "container",
    "ended_in",
    "follows",
    "forked_from",
    "lost",
    "reused",
    "since",
    "started_in",
    "unreadable",
}
"""Fields of records whose text is an id."""


def words() -> dict[str, tuple[str, str]]:
    """The words of `--json`, each with its type and meaning: fields of answers, as their docstrings describe them, and the rest.

    One word has one type and one meaning, in every command. Types: `text`, `id` (32 or 64 hexadecimal digits), `time` (ISO 8601
    in UTC), `count` (a whole number), `number`, `bool`, `object` (of such words), `map` (its keys are data), `any` (recorded as
    it was given), and lists of them. Any may be null: there is none, or it is not known yet."""
    found: dict[str, tuple[str, str]] = {}
    for record in find_records(ApiRecord).values():
        if not issubclass(record, Request):
            described = docstrings(record)
            for name, hint in types_of(record).items():
                if name in described:
                    found.setdefault(name, (_type_of(name, hint), re.sub(r"(?<!\.)\.$", "", described[name])))
    return found | _WORDS


def _type_of(name: str, hint: Any) -> str:
    origin, inside = get_origin(hint), [one for one in get_args(hint) if one not in (NoneType, ...)]
    if origin is tuple:
        return f"list of {_type_of(name, inside[0])}"
    if origin is Literal:
        return "text"
    if hint is str:
        return "id" if name in _IDS else "time" if name.endswith("_at") else "text"
    if origin is dict or hint in _TYPES:
        return _TYPES[origin or hint]
    return _type_of(name, inside[0]) if inside else "object"  # with marks, or null


_TYPES: dict[Any, str] = {int: "count", float: "number", bool: "bool", dict: "map", Any: "any"}


def reference() -> str:
    """The whole page as Markdown."""
    lines = [_INTRODUCTION, *_exit_codes(), *_contents()]
    for name, command in _walk():
        lines += _section(name, command)
    lines += _words()
    return "\n".join(lines).rstrip() + "\n"


def _walk() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {child}", each) for child, each in command.commands.items())


def _exit_codes() -> list[str]:
    lines = [
        "## Exit codes",
        "",
        "| code | meaning |",
        "|---|---|",
        "| 0 | it worked |",
        "| 1 | the answer to a question was no; or what the command itself says of 1 |",
    ]
    lines += [
        f"| {kind.exit_code} | {code} |"
        for code, kind in sorted(errors.BY_CODE.items(), key=lambda item: item[1].exit_code)
    ]
    lines += [
        "| 130 | interrupted by Ctrl-C |",
        "| 141 | the reader of standard output went away |",
        "",
        "`run`, `create`, `exec` and `attach` follow docker: 125 for every failure of snapshotd, 126 when the command was found but cannot "
        "be run, 127 when it was not found; otherwise the code of the command or agent itself. `resume` ends with the agent's code too, "
        "but with those of the table where snapshotd failed or has a question.",
        "",
    ]
    return lines


def _words() -> list[str]:
    lines = [
        "## The words of --json",
        "",
        "One word has one type and one meaning in every command, and in the API and the client where they say the same. ",
    ]
    lines[-1] += (
        "An `id` is 32 or 64 hexadecimal digits, never a prefix or a name; a `time` is ISO 8601 in UTC; the keys of a `map` are data; "
        "`any` is as it was recorded. Any may be null: there is none, or it is not known yet."
    )
    rows = (f"| `{word}` | {kind} | {meaning} |" for word, (kind, meaning) in sorted(words().items()))
    return [*lines, "", "| word | type | |", "|---|---|---|", *rows, ""]


def _contents() -> list[str]:
    lines = ["## Overview", "", "| command | |", "|---|---|"]
    for name, command in _walk():
        if " " not in name:
            lines.append(f"| [`{name}`](#snapshotd-{name}) | {command.get_short_help_str(200)} |")
    return [*lines, ""]


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"snapshotd {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"## snapshotd {name}",
        "",
        "```",
        f"snapshotd {name} {usage}",
        "```",
        "",
        *_paragraphs(command.help or ""),
        "",
    ]
    rows = [_row(param) for param in command.params if isinstance(param, click.Option) and _is_listed(param)]
    if rows:
        lines += ["| option | |", "|---|---|", *rows, ""]
    if isinstance(command, CliCommand) and command.examples:
        lines += ["```sh", *command.examples, "```", ""]
    return lines


def _is_listed(option: click.Option) -> bool:
    return not option.hidden and option.name not in ("state_dir", "socket")


def _row(option: click.Option) -> str:
    """Not click's own rendering of an option, which differs between its versions."""
    value = ""
    if isinstance(option.type, click.Choice):
        value = " " + "\\|".join(str(choice) for choice in option.type.choices)
    elif not option.is_flag:
        value = " " + (option.metavar or option.type.name.upper())
    text = " ".join((option.help or "").split())
    if option.show_default and not option.is_flag:
        text += f" [default: {option.default}]"
    return f"| `{', '.join(option.opts)}{value}` | {text} |"


def _paragraphs(text: str) -> list[str]:
    """The help's paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).splitlines()


def main() -> int:
    os.environ.pop("COLUMNS", None)
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
