"""`snapshotd edit`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from snapshotd.cli.command import ask, connect, declare, json_option, refuse
from snapshotd.cli.documents import as_page, file_bytes, json_file, json_value, messages_of
from snapshotd.cli.follow import note, patience
from snapshotd.cli.text import print_json
from snapshotd.cli.values import Count, Name, Pair, complete_snapshot, env_option
from snapshotd.cli.waiting import Wait, wait_for_head, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.local.arguments import sandbox_path
from snapshotd.client.verbs.history import RECORDED
from snapshotd.errors import NotFound, UsageError

_EXAMPLES = [
    "snapshotd edit a1b2c3   # opens $EDITOR",
    "snapshotd edit a1b2c3 --file app.py=fixed.py --resume",
    "snapshotd edit a1b2c3 --drop-messages 2 --message user='use the other library' --resume",
    "snapshotd edit a1b2c3 --result result.json --state attempts=0 --name second-try",
]
_TAIL = 20
"""Number of messages that the editor shows: more would hide the rest of the document."""
_RESULT_BYTES = 1 << 20


@declare("edit", examples=_EXAMPLES)
@click.option(
    "--file",
    "files",
    metavar="PATH=FILE",
    type=Pair("PATH=FILE"),
    multiple=True,
    help="Put FILE's content at PATH in the sandbox (a path without a leading / starts at /workspace).",
)
@click.option("--remove", "removed", metavar="PATH", multiple=True, help="Remove PATH in the sandbox.")
@click.option(
    "--message", "added", metavar="ROLE=TEXT", type=Pair("ROLE=TEXT"), multiple=True, help="Append a message."
)
@click.option(
    "--drop-messages", metavar="N", type=Count(0), help="Leave out the last N messages, before any are appended."
)
@click.option(
    "--messages", metavar="FILE", help='Put the JSON array of {"role","content"} in FILE in place of the conversation.'
)
@click.option("--result", metavar="FILE", help="Another result of the snapshot's tool call: the JSON in FILE.")
@click.option(
    "--state",
    metavar="KEY=JSON",
    type=Pair("KEY=JSON"),
    multiple=True,
    help="Set a key of the agent's state; null removes it.",
)
@env_option
@click.option("--resume", is_flag=True, help="Let the agent go on from there; `snapshotd attach` follows it.")
@click.option("--name", type=Name(), metavar="NAME", help="Name of the new trajectory.")
@wait_option
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(
    ctx: click.Context, snapshot: str, resume: bool, name: str | None, wait: Wait | None, as_json: bool, **options: Any
) -> None:
    """Make a new trajectory from a snapshot with something changed.

    A file, a message, the tool call's result, a value of the state, or the environment; the old snapshot stays as it
    is. Without any of these, opens $EDITOR on the end of the conversation, the state and the result. Prints the new
    trajectory's id. With --json: {"trajectory"}.
    """
    given = any(value not in (None, ()) for value in options.values())
    if not given and not (sys.stdin.isatty() and sys.stdout.isatty()):
        refuse(
            "nothing is to be changed: name it with --file, --message, --result, --state or --env, or use a terminal for an editor"
        )
    changes = _changes(options) if given else None
    client = connect(ctx)
    if changes is None:
        changes = _in_editor(client, snapshot)
    if changes is None:
        note("nothing was changed, so nothing was made")
        return
    with patience():
        made = client.edit(snapshot, **changes, name=name, resume=resume, wait=wait or "captured")
    if as_json:
        print_json({"trajectory": made.id, **({} if wait is None else {"state": wait_for_head(client, made.id, wait)})})
    else:
        click.echo(made.id)


def _changes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the client's keywords for the options. UsageError: options contradict each other."""
    files: dict[bytes, bytes | None] = {
        sandbox_path(path): file_bytes(source, f"the content of {path}") for path, source in options["files"]
    }
    for path in options["removed"]:
        if sandbox_path(path) in files:
            refuse(f"{path} is written and removed; leave one of them out")
        files[sandbox_path(path)] = None
    if options["messages"] is not None and options["drop_messages"] is not None:
        refuse("--messages replaces the whole conversation, so there is nothing to drop; leave out --drop-messages")
    whole = (
        None
        if options["messages"] is None
        else messages_of(json_file(options["messages"], "the conversation"), options["messages"])
    )
    return {
        "files": files,
        "messages": whole,
        "drop_messages": options["drop_messages"] or 0,
        "add_messages": options["added"],
        "result": RECORDED if options["result"] is None else json_file(options["result"], "the result"),
        "state": {key: json_value(text, f"the value of {key}") for key, text in options["state"]},
        "env": dict(options["env"]),
    }


# -- the editor --------------------------------------------------------------------------------------------------------


def _in_editor(client: Snapshotd, ref: str) -> dict[str, Any] | None:
    """Let a person change the document. Returns the client's keywords for the changes; None: there are none. Broken JSON is not
    lost: the person can mend it."""
    before = _document(client, ref)
    text = as_page(before)
    while True:
        edited = _edit_text(text)
        if edited is None or edited == text:
            return None
        try:
            return _difference(before, json_value(edited, "the document"))
        except (click.UsageError, UsageError) as exc:
            note(exc.message)
            ask("Edit it again?", default=True)
        text = edited


def _edit_text(text: str) -> str | None:
    """Open the text in a person's editor. Returns the text that was saved; None: nothing was. UsageError: the editor failed."""
    try:
        edited = click.edit(text.encode(), extension=".json")
    except (click.ClickException, ValueError) as exc:  # it cannot be run, it failed, or $EDITOR cannot be split
        raise UsageError(
            f"the editor failed, so nothing was made ({exc}); set EDITOR to one that works, or name the changes with --file, "
            "--message, --result, --state or --env"
        ) from exc
    return None if edited is None else edited.decode(errors="replace")


def _document(client: Snapshotd, ref: str) -> dict[str, Any]:
    messages = [{"role": item.role, "content": item.content} for item in client.conversation(ref)]
    document: dict[str, Any] = {
        "messages_before": max(0, len(messages) - _TAIL),
        "messages": messages[-_TAIL:],
        "state": client.state(ref),
    }
    result = _result(client, ref)
    return document if result is RECORDED else {**document, "result": result}


def _result(client: Snapshotd, ref: str) -> Any:
    """Return the recorded result of the tool call; RECORDED: the call has none, or one that is no JSON or too large to edit."""
    data = b""
    try:
        for piece in client.output(ref, "output"):
            data += piece
            if len(data) > _RESULT_BYTES:
                return RECORDED
        return json.loads(data)
    except (ValueError, RecursionError, NotFound):
        return RECORDED


def _difference(before: dict[str, Any], after: Any) -> dict[str, Any] | None:
    """Return the client's keywords that turn one document into the other; None: they are the same."""
    allowed = {*before, "result"}
    if not isinstance(after, dict) or not set(after) <= allowed or not isinstance(after.get("state", {}), dict):
        raise UsageError(f"the document must be an object with {', '.join(sorted(allowed))}, and its state an object")
    if after.get("messages_before", before["messages_before"]) != before["messages_before"]:
        raise UsageError("messages_before only says how many messages come before these, and cannot be changed")
    old, new = messages_of(before["messages"], "messages"), messages_of(after.get("messages", []), "messages")
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if _differ(a, b)), min(len(old), len(new)))
    state = after.get("state", {})
    changes: dict[str, Any] = {
        "drop_messages": len(old) - same,
        "add_messages": new[same:],
        "state": {
            **{
                key: value
                for key, value in state.items()
                if key not in before["state"] or _differ(before["state"][key], value)
            },
            **{key: None for key in before["state"] if key not in state},
        },
    }
    if "result" in after and ("result" not in before or _differ(after["result"], before["result"])):
        changes["result"] = after["result"]
    return (
        changes
        if any(changes[key] for key in ("drop_messages", "add_messages", "state")) or "result" in changes
        else None
    )


def _differ(a: Any, b: Any) -> bool:
    """True if two JSON values differ: for Python, true is 1."""
    return json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)
