"""`snapshotd show`."""

from __future__ import annotations

import itertools
import json
from typing import Literal

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import RawOutput
from snapshotd.cli.snapshots import details_json, state_text
from snapshotd.cli.text import file_counts, milliseconds, print_json, printable, size
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ModelUseInfo, SnapshotInfo
from snapshotd.terms import number_of

_HEAD_LINES = 10
_HEAD_BYTES = 4096
_ARGUMENTS_CHARS = 2000
_STATES = {"lost": "its files are gone, ", "pruned": "its files were given up by a retention policy, "}


@declare(
    "show",
    examples=[
        "snapshotd show a1b2c3",
        "snapshotd show --output stdout a1b2c3 > log.txt",
        "snapshotd show --conversation best",
    ],
)
@click.option(
    "--output",
    type=click.Choice(["stdout", "stderr", "output"]),
    help="Only this output of the tool call, raw and whole.",
)
@click.option("--conversation", is_flag=True, help="Only the conversation up to it.")
@json_option
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(
    ctx: click.Context,
    snapshot: str,
    output: Literal["stdout", "stderr", "output"] | None,
    conversation: bool,
    as_json: bool,
) -> None:
    """Show everything about one snapshot.

    Its tool call with arguments and the beginning of its outputs, its files, state and tags, how long the conversation
    was, and what the model calls before it took. With --json: as `log --json`, and method, message_count, image, layers,
    follows, side_effect, sub_agent, model_use ({call_count,duration_ms,input_tokens,output_tokens,cached_tokens,cost_usd}), and the tool's
    error, outputs, damaged and started_at. An output that was damaged on disk and given up by a repair is shown as
    that, and asking for it fails (20).
    """
    client = connect(ctx)
    if output is not None:
        raw = RawOutput()
        for piece in client.output(snapshot, output):
            raw.write("stdout", piece)
    elif conversation:
        _conversation(client, snapshot, as_json)
    elif as_json:
        print_json(details_json(client.snapshot(snapshot)))
    else:
        _print(client, client.snapshot(snapshot))


def _conversation(client: Snapshotd, ref: str, as_json: bool) -> None:
    messages = client.conversation(ref)
    if as_json:
        print_json(messages)
        return
    for message in messages:
        text = message.content if isinstance(message.content, str) else json.dumps(message.content, ensure_ascii=False)
        click.echo(click.style(f"{printable(message.role)}:", bold=True))
        for line in text.split("\n"):
            click.echo(f"  {printable(line)}")


def _print(client: Snapshotd, item: SnapshotInfo) -> None:
    tool = item.tool
    arguments = printable(json.dumps(tool.arguments, ensure_ascii=False))
    if len(arguments) > _ARGUMENTS_CHARS:
        arguments = f"{arguments[:_ARGUMENTS_CHARS]}… ({len(arguments)} characters; all of them with --json)"
    outcome = tool.status if tool.exit_code is None else f"{tool.status}, exit code {tool.exit_code}"
    facts = [
        ("snapshot", item.id),
        ("parent", item.parent or "-"),
        ("trajectory", f"{item.trajectory}  (seq {item.seq})"),
        ("tags", " ".join(item.tags) or "-"),
        ("created", item.created_at),
        ("state", f"{state_text(item)}, {_STATES.get(item.state, '')}captured by {item.method}"),
        ("pause", milliseconds(item.pause_ms)),
        ("image", f"{item.image}  (+ {number_of(item.layers, 'layer')})"),
        ("files", file_counts(item.files) + ("" if item.files is None else f"  {size(item.files.bytes)}")),
        (
            "conversation",
            number_of(item.messages, "message") + ("  (--conversation shows them)" if item.messages else ""),
        ),
        ("tool", printable(tool.name)),
        ("arguments", arguments),
        ("outcome", f"{outcome}, {milliseconds(tool.duration_ms)}"),
    ]
    if item.model_use is not None:
        facts.append(("model", _model(item.model_use)))
    if item.follows is not None:
        facts.insert(2, ("mind", f"continues that of {item.follows}"))
    if item.reused is not None:
        facts.append(("reused", f"answered from {item.reused}, without a run"))
    if tool.error:
        facts.append(("error", printable(tool.error)))
    facts += [("warning", printable(warning)) for warning in item.warnings]
    facts += [("refused", printable(sentence)) for sentence in item.refused]
    for key, value in facts:
        click.echo(click.style(f"{key:13}", bold=True) + value)
    for which in ("stdout", "stderr", "output"):
        if which in tool.outputs:
            _print_head(client, item.id, which)
    for lost in tool.damaged:
        count = "its content" if lost.bytes is None else number_of(lost.bytes, "byte")
        click.echo(f"{click.style(f'{lost.output}:', bold=True)}\n  damaged and gone: {count} (hash {lost.hash})")


def _model(use: ModelUseInfo) -> str:
    tokens = f"{use.input_tokens} tokens in ({use.cached_tokens} cached), {use.output_tokens} out"
    cost = "" if use.cost_usd is None else f", ${use.cost_usd:.4f}"
    return f"{number_of(use.call_count, 'call')} in {milliseconds(use.duration_ms)}, {tokens}{cost}"


def _print_head(client: Snapshotd, ref: str, which: Literal["stdout", "stderr", "output"]) -> None:
    head = b""
    pieces = client.output(ref, which)
    for piece in pieces:
        head += piece
        if len(head) > _HEAD_BYTES or head.count(b"\n") > _HEAD_LINES:
            break
    else:
        if not head:
            return
    lines = head[:_HEAD_BYTES].decode(errors="surrogateescape").splitlines()
    click.echo(click.style(f"{which}:", bold=True))
    for line in itertools.islice(lines, _HEAD_LINES):
        click.echo(f"  {printable(line)}")
    if len(lines) > _HEAD_LINES or len(head) > _HEAD_BYTES:
        click.echo(f"  … (all of it: snapshotd show --output {which} {ref[:12]})")
