"""`snapshotd-agent`: the library for programs in other languages, one process per request.

Exit status: 0 done, 1 refused or failed, 2 wrong usage, 10 replayed (the call ran before: do not run it, its result is
on stdout), 11 denied, 69 the daemon cannot be reached. Reasons are on stderr. Outside of a sandbox commands run and
nothing is recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List, Optional

from snapshotd.agent import approvals, conversation, facts, holder, runner, subtasks, terminal
from snapshotd.agent.calls import PIECE_BYTES, put
from snapshotd.agent.session import session, warn
from snapshotd.agent.spec import SIDE_EFFECTS, compensation
from snapshotd.agent.states import state
from snapshotd.agent.wire.connection import Denied, SnapshotdError, SnapshotdUnavailable
from snapshotd.agent.wire.values import clean, label, strict

REFUSED, REPLAYED, DENIED, UNAVAILABLE = 1, 10, 11, 69


def main(arguments: Optional[List[str]] = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    command: List[str] = []
    if (
        given[:1] == ["run"] and "--" in given
    ):  # before argparse sees it: what it makes of options behind -- differs between versions
        cut = given.index("--")
        given, command = given[:cut], given[cut + 1 :]
    options = _parser().parse_args(given)
    options.command = command
    try:
        return int(options.action(options))
    except Denied as exc:
        return _report(exc, DENIED)
    except SnapshotdUnavailable as exc:
        return _report(exc, UNAVAILABLE)
    except (SnapshotdError, ValueError, TypeError, OSError) as exc:
        return _report(exc, REFUSED)


def _report(error: BaseException, status: int) -> int:
    warn(str(error))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="snapshotd-agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_calls(commands)
    _add_mind(commands)
    return parser


def _command(
    commands: Any, name: str, action: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    made.set_defaults(action=action)
    return made


def _add_calls(commands: Any) -> None:
    begin = _command(
        commands, "begin", _begin, "Begin a tool call; prints its id. With --json the daemon's whole answer."
    )
    run = _command(
        commands, "run", _run, "Run a command as a tool call, with its output and exit status: run NAME -- COMMAND..."
    )
    for made in (begin, run):
        made.add_argument("name")
        made.add_argument("--arguments", type=_json, metavar="JSON", help="what is recorded as the call's arguments")
        made.add_argument("--side-effect", choices=SIDE_EFFECTS, default="local")
        made.add_argument("--key", help="an idempotency key of your own")
        made.add_argument("--approve", action="store_true", help="a person has to agree first")
        made.add_argument("--question", metavar="TEXT", help="a person has to agree to this first")
        made.add_argument(
            "--compensate", type=_json, metavar="JSON", help="the command that undoes it, as a list of texts"
        )
        made.add_argument("--task", help="the subtask that it belongs to")
        made.add_argument(
            "--no-reuse", action="store_true", help="its outcome depends on more than its arguments and the files"
        )
    begin.add_argument("--json", action="store_true")
    end = _command(
        commands, "end", _end, "End a call that was begun; returns when the snapshot is taken, and prints its id."
    )
    end.add_argument("call")
    end.add_argument("--status", choices=("done", "failed"), default="done")
    end.add_argument("--result", metavar="JSON", help="- for standard input")
    end.add_argument("--text", metavar="TEXT", help="a result that is text; - for standard input")
    end.add_argument("--error", help="by convention Type: message")
    end.add_argument("--exit-code", type=int)
    output = _command(commands, "output", _output, "Pass on standard input as output of a call that runs.")
    output.add_argument("call")
    output.add_argument("--stream", choices=("stdout", "stderr"), default="stdout")


def _add_mind(commands: Any) -> None:
    message = _command(commands, "message", _message, "Append a message to the conversation.")
    message.add_argument("role")
    message.add_argument("text", help="- for standard input")
    message.add_argument("--json", action="store_true", help="it is JSON")
    _command(commands, "messages", lambda options: _print(conversation.messages()), "Print the conversation as JSON.")
    _command(commands, "checkpoint", _checkpoint, "Take a snapshot and print its id.").add_argument("name")
    approve = _command(
        commands, "approve", _approve, "Ask a person. Exit status 0 if they agree, 11 if not; prints what they said."
    )
    approve.add_argument("question")
    approve.add_argument("--details", type=_json, metavar="JSON")
    approve.add_argument("--expires", type=float, metavar="SECONDS")
    state_of = commands.add_parser("state", help="Read and change the agent's state.").add_subparsers(
        metavar="COMMAND", required=True
    )
    _command(state_of, "get", _state_get, "Print a value, or all of them, as JSON.").add_argument("key", nargs="?")
    setting = _command(state_of, "set", _state_set, "Set a value.")
    setting.add_argument("key")
    setting.add_argument("value", type=_json, metavar="JSON")
    _command(state_of, "unset", _state_unset, "Remove a value.").add_argument("key")
    task = _command(commands, "task", _task, "Declare or change a subtask.")
    task.add_argument("name")
    task.add_argument("status", choices=subtasks.STATUSES)
    task.add_argument("--depends", action="append", default=[], metavar="NAME")
    task.add_argument("--note", default="")
    _command(commands, "tasks", lambda options: _print(subtasks.tasks()), "Print all subtasks as JSON.")
    for name, fact in (("now", facts.now), ("random", facts.random), ("uuid", facts.uuid)):
        show = lambda options, fact=fact: _print(fact())  # noqa: E731
        _command(commands, name, show, "Print a value that stays the same in a replay.")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError("not JSON: {}".format(exc)) from None


def _input(text: str) -> str:
    return sys.stdin.buffer.read().decode("utf-8", "backslashreplace") if text == "-" else text


def _print(value: Any) -> int:
    sys.stdout.write(value + "\n" if isinstance(value, str) else json.dumps(value) + "\n")
    sys.stdout.flush()
    return 0


# -- calls -------------------------------------------------------------------------------------------------------------


def _fields(options: argparse.Namespace) -> Dict[str, Any]:
    fields: Dict[str, Any] = {"call": os.urandom(16).hex(), "name": label("A tool's name", options.name)}
    optional = {
        "side_effect": "" if options.side_effect == "local" else options.side_effect,
        "key": options.key and label("An idempotency key", options.key),
        "task": options.task,
        "approve": options.question or options.approve,
        "compensate": options.compensate and compensation(options.name, options.compensate),
    }
    fields.update((name, value) for name, value in optional.items() if value)
    if options.no_reuse:
        fields["reuse"] = False
    elif options.command:
        fields["code"] = hashlib.sha256(repr(options.command).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return fields


def _ask_outside(options: argparse.Namespace) -> None:
    """The terminal decides about gated calls. Denied."""
    if options.question or options.approve:
        decision = terminal.ask(options.question or "Run {}?".format(options.name), options.arguments)
        if not decision["approved"]:
            raise Denied("{} was not approved: {}".format(options.name, decision["reason"]))


def _begin(options: argparse.Namespace) -> int:
    fields = _fields(options)
    if not session.inside():
        _ask_outside(options)
        return _print(
            {"call": fields["call"], "key": fields.get("key", fields["call"])} if options.json else fields["call"]
        )
    answer = holder.start(fields, put(fields, "arguments", {} if options.arguments is None else options.arguments))
    replayed = answer.get("replayed")
    if replayed is not None:
        replayed.setdefault("result", answer.get("body"))
        if replayed.get("error"):
            warn(replayed["error"])
        _print(replayed if options.json else replayed["result"])
        return REPLAYED
    if options.json:
        return _print(
            dict({name: answer[name] for name in ("key", "arguments") if name in answer}, call=fields["call"])
        )
    if "arguments" in answer:
        warn("the approver changed the arguments; begin with --json says to what")
    return _print(fields["call"])


def _end(options: argparse.Namespace) -> int:
    fields: Dict[str, Any] = {"status": options.status}
    if options.exit_code is not None:
        if not 0 <= options.exit_code <= 255:
            raise ValueError("The exit code is {}; it can be 0 to 255.".format(options.exit_code))
        fields["exit_code"] = options.exit_code
    if options.error is not None:
        fields["error"] = clean(options.error)
    result: Any = None
    if options.text is not None:
        result = clean(_input(options.text))
    elif options.result is not None:
        result = strict(json.loads(_input(options.result)))
    if not session.inside():
        return 0
    return _print(str(holder.forward(options.call, "call_end", fields, result)["snapshot"]))


def _output(options: argparse.Namespace) -> int:
    import base64

    while True:
        data = os.read(0, PIECE_BYTES)
        if not data:
            return 0
        if session.inside():
            holder.forward(
                options.call, "output", {"stream": options.stream, "data_b64": base64.b64encode(data).decode("ascii")}
            )


def _run(options: argparse.Namespace) -> int:
    if not options.command:
        raise ValueError("There is no command to run: snapshotd-agent run NAME -- COMMAND...")
    if not session.inside():
        _ask_outside(options)
        try:
            return runner.status_of(subprocess.run(options.command, check=False).returncode)
        except FileNotFoundError as exc:
            return _report(exc, 127)
    return runner.run(_fields(options), options.command, options.arguments)


# -- the mind ----------------------------------------------------------------------------------------------------------


def _message(options: argparse.Namespace) -> int:
    text = _input(options.text)
    conversation.message(options.role, json.loads(text) if options.json else text)
    return 0


def _checkpoint(options: argparse.Namespace) -> int:
    taken = conversation.checkpoint(options.name)
    return 0 if taken is None else _print(taken)


def _approve(options: argparse.Namespace) -> int:
    decision = approvals.approve(options.question, options.details, options.expires)
    said = decision.answer if decision else decision.reason
    if said is not None:
        _print(said)
    return 0 if decision else DENIED


def _state_get(options: argparse.Namespace) -> int:
    if options.key is None:
        return _print(dict(state))
    if options.key not in state:
        return _report(KeyError("the state has no {}".format(options.key)), REFUSED)
    sys.stdout.write(json.dumps(state[options.key]) + "\n")
    return 0


def _state_set(options: argparse.Namespace) -> int:
    state[options.key] = options.value
    return 0


def _state_unset(options: argparse.Namespace) -> int:
    state.pop(options.key, None)
    return 0


def _task(options: argparse.Namespace) -> int:
    subtasks.change(label("A task's name", options.name), options.status, options.depends, clean(options.note))
    return 0
