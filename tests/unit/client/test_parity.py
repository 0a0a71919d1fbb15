"""The command line and both clients can do the same: each verb is in all three, or a table here says why not."""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any, is_typeddict

import pytest

from snapshotd import client
from snapshotd.api.commands import ExecRequest
from snapshotd.api.history import RewindQuery
from snapshotd.api.operations import OPERATIONS
from snapshotd.api.record import types_of
from snapshotd.api.trajectories import CreateRequest, LimitsRequest, RunAgentRequest
from snapshotd.cli.main import find_commands
from snapshotd.client import AsyncSnapshotd, Snapshotd
from tests.own_sources import texts, walk

OTHER_NAMES = {
    "approvals": "approvals",
    "attach": "events",
    "cp": "upload",
    "df": "usage",
    "effects": "effects",
    "image": "images",
    "import": "import_bundle",
    "inspect": "trajectory",
    "kill": "signal_command",
    "logs": "events",
    "ls": "trajectories",
    "ps": "sandboxes",
    "rm": "remove",
    "shell": "exec",
    "fleet": "fleet_status",
    "show": "snapshot",
    "snapshot": "take_snapshot",
    "store": "put_value",
    "token": "tokens",
    "tree": "all_snapshots",
    "umount": "unmount",
}
"""Command to the client's method, where they do not have one name."""

ONLY_COMMANDS = {
    "catalog": "copies a catalog while no daemon has it",
    "completion": "prints a script for the user's shell",
    "daemon": "is the daemon; the client starts one by itself",
    "dial": "carries a connection of a client that comes through ssh",
    "doctor": "looks at the machine where no daemon can run",
    "hooks": "writes the settings of programs of this machine",
    "login": "keeps a token on this machine",
    "logout": "forgets it",
    "mcp": "serves the verbs to a program that speaks the Model Context Protocol",
    "ui": "serves a page to a browser of this machine",
    "serve": "is the daemon, as `daemon`, or serves the verbs to programs that were written for a service",
    "setup": "installs packages on this machine",
}
"""Commands that are no verbs of a daemon."""

ONLY_METHODS = {
    "ask": "for programs that run a graph, and come back for the answer",
    "fork_queue": "the queue of `fork --parallel`, with functions as its parts",
    "run_experiment": "`experiment run` begins one and follows it, so that Ctrl-C knows which to stop",
    "write_command": "a command line gives a running command no further input",
    "write_files": "`cp` writes files that exist",
    "write_file": "`cp -` and `edit` write",
    "keep_alive": "for drivers of a fleet, which renew all that they have; a command is itself a use of the sandbox",
    "fleet_nodes": "for `Fleet`, which places forks",
    "fleet_snapshot": "for `Fleet`",
    "reserve": "for `Fleet`",
    "drain_node": "`fleet drain`",
    "forget_node": "`fleet forget`",
    "end_reservation": "for `Fleet`",
    "make_dir": "`exec BOX -- mkdir`",
    "remove_file": "`exec BOX -- rm`",
    "rename_file": "`exec BOX -- mv`",
    "list_files": "`exec BOX -- ls`",
    "read_file": "`cat` and `cp`",
    "lstat": "a part of `apply`",
    "overview": "the list of trajectories of `ui`",
    "flush": "`--wait stored` calls it",
    "wait": "`wait` follows the events, and tells the error that ended the run",
}
"""Methods without a command of their own."""

RECORDS = {one.__name__: one for row in OPERATIONS.values() for one in (row.body, row.query) if isinstance(one, type)}
SENT_IN = {
    "CommandOptions": ExecRequest,
    "LimitOptions": LimitsRequest,
    "RewindPreviewOptions": RewindQuery,
    "RunOptions": RunAgentRequest,
    "SandboxOptions": CreateRequest,
    "TrialOptions": ExecRequest,
}
"""Keyword lists whose record has another name."""


def methods(cls: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls) if not name.startswith("_")}


def called(source: str) -> set[str]:
    return {node.attr for node in walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def test_every_command_has_a_method_in_both_clients() -> None:
    assert not OTHER_NAMES.keys() & ONLY_COMMANDS.keys()
    verbs = {command: OTHER_NAMES.get(command, command) for command in find_commands() if command not in ONLY_COMMANDS}
    assert [item for item in verbs.items() if item[1] not in methods(Snapshotd)] == []
    assert [item for item in verbs.items() if item[1] not in methods(AsyncSnapshotd)] == []
    assert OTHER_NAMES.keys() | ONLY_COMMANDS.keys() <= find_commands().keys(), (
        "a command that is no more is in no table"
    )


def test_every_method_has_a_command() -> None:
    used = set().union(*(called(text) for file, text in texts().items() if file.startswith("cli/")))
    left = methods(Snapshotd).keys() - used - ONLY_METHODS.keys()
    assert sorted(left) == [], "give it a command, or say in ONLY_METHODS why there is none"
    assert ONLY_METHODS.keys() <= methods(Snapshotd).keys()


@pytest.mark.parametrize("name", [n.removeprefix("Async") for n in client.__all__ if n.startswith("Async")])
def test_both_clients_have_the_same_methods_with_the_same_parameters(name: str) -> None:
    plain, asynchronous = methods(getattr(client, name)), methods(getattr(client, f"Async{name}"))
    assert plain.keys() == asynchronous.keys()
    for method in plain:
        if callable(plain[method]):
            assert shape(plain[method]) == shape(asynchronous[method]), f"{name}.{method}"


def test_the_clients_keywords_are_members_of_what_they_are_sent_in() -> None:
    """A keyword list stands beside its record, and a keyword that no record has would be sent nowhere."""
    found = {}
    for module in {sys.modules[one.__module__] for one in RECORDS.values()}:
        for name, keywords in vars(module).items():
            if (
                name[0] != "_"
                and name.endswith("Options")
                and is_typeddict(keywords)
                and keywords.__module__ == module.__name__
            ):
                stem = name.removesuffix("Options")
                record = SENT_IN.get(name) or RECORDS.get(f"{stem}Request") or RECORDS[f"{stem}Query"]
                members = {*types_of(record), *(types_of(LimitsRequest) if "limits" in types_of(record) else ())}
                members |= {one.removesuffix("_s").removesuffix("_bytes").removesuffix("_b64") for one in members}
                found[name] = keywords.__annotations__.keys() - members
    assert {name: left for name, left in found.items() if left} == {}
    assert len(found) > 8


def shape(method: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    return [
        (one.name, one.kind, one.default if not callable(one.default) else "a function")
        for one in inspect.signature(method).parameters.values()
    ]


def test_what_waits_is_a_coroutine_and_the_rest_an_iterator_or_plain() -> None:
    """Nothing of the asynchronous client talks to the daemon and blocks."""
    plain = {
        name
        for name, method in methods(AsyncSnapshotd).items()
        if not inspect.iscoroutinefunction(method)
        and not inspect.isasyncgenfunction(method)
        and not isinstance(method, property)
    }
    annotations = {name: inspect.signature(getattr(AsyncSnapshotd, name)).return_annotation for name in plain}
    assert {name: text for name, text in annotations.items() if not str(text).startswith("AsyncIterator[")} == {}
