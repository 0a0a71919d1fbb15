"""One word for one thing: every command's --json, all in one table of words."""

from __future__ import annotations

import json

import click

from snapshotd.cli.main import cli as group
from snapshotd.cli.main import find_commands
from snapshotd.cli.reference import _WORDS
from tests.json_words import faults
from tests.unit.cli.conftest import Cli
from tests.unit.cli.world import World

ELSEWHERE = {
    "bisect",
    "catalog migrate",
    "daemon",
    "fleet drain",
    "fleet forget",
    "fleet status",
    "merge",
    "network",
    "port",
}
SAID_ELSEWHERE = {
    *("unknown", "tried"),  # bisect
    *("address",),  # port
    *("row_count", "tables", "sha256"),  # tests/contract/test_catalog_migration.py
    *(
        "durability",
        "free_bytes",
        "free_memory_bytes",
        "image_count",
        "processor_count",
        "instance",
        "layer_kind",
        "policy_file",
        "runtimes",
        "sandbox_count",
        "settings",
        "trajectory_count",
        "started",
        "stopped",
        "tag_count",
        "weaker",
    ),  # the daemon
    *("listening", "fingerprint"),  # a daemon that other machines reach
    *("checkpoints", "from", "left_out", "reuse", "stderr_b64", "to"),
}
"""No answer here has them; tests/e2e/test_json.py has most."""


def leaves() -> set[str]:
    """Every command that prints JSON."""
    context, found = click.Context(group), set()
    for name in find_commands():
        command = group.get_command(context, name)
        children = command.commands if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {child}".strip() for child in children}
    return found - {"shell", "completion", "ui", "mcp", "serve", "login", "logout", "dial"} - ELSEWHERE


def named(line: list[str]) -> str:
    return " ".join(line[: 2 if line[0] in GROUPS else 1])


GROUPS = ("experiment", "image", "store", "hooks", "token")
_STATE = "state"
"""`state --json` prints the agent's own object."""


def test_every_command_speaks_the_same_words(cli: Cli, world: World) -> None:
    met, said, found = set(), set(), []
    for words in world.lines():
        line = words.split()
        met.add(named(line))
        at = line.index("--") if "--" in line else len(line)
        done = cli(*line[:at], "--json", *line[at:])
        answers = [json.loads(text) for text in done.out.splitlines()]
        if not answers or any(
            "error" in one and isinstance(one["error"], dict) for one in answers if isinstance(one, dict)
        ):
            found.append(f"{line} failed: {done.err}")
            continue
        for answer in answers if named(line) != _STATE else []:
            kind = "list of object" if isinstance(answer, list) else "object"
            found += [f"{' '.join(line)}: {fault}" for fault in faults(answer, kind, "the answer", said)]
    assert found == [], "\n".join(found)
    assert met == leaves()
    assert _WORDS.keys() - said == SAID_ELSEWHERE
