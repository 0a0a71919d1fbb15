"""`snapshotd run`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from snapshotd.cli.command import (
    CONTEXT_SETTINGS,
    after_dashes,
    connect,
    declare,
    is_local,
    is_terminal,
    json_option,
    refuse,
    refuse_input,
    standard_input,
)
from snapshotd.cli.commands.running.exec import exec_in_terminal
from snapshotd.cli.follow import follow, note, patience
from snapshotd.cli.text import print_answer
from snapshotd.cli.values import check_file, check_folder, make_image, sandbox_keywords, sandbox_options
from snapshotd.cli.waiting import Wait, wait_for_head, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.local import profiles
from snapshotd.client.local.profiles import AgentProfile
from snapshotd.config import places
from snapshotd.errors import Unsupported

_EXAMPLES = [
    "snapshotd run agent.py",
    "snapshotd run --workspace . --network bridge --env OPENAI_API_KEY agent.py --task 'fix the tests'",
    "snapshotd run --workspace . claude -p 'fix the tests'",
    "snapshotd run -it --workspace . claude",
    "snapshotd run --workspace . -- pytest -q",
    "snapshotd run --reuse --workspace . agent.py",
    "snapshotd run --detach --name nightly agent.py && snapshotd attach nightly",
]


@declare(
    "run",
    examples=_EXAMPLES,
    docker_codes=True,
    splits=True,
    options_metavar="[OPTIONS]",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
)
@sandbox_options
@click.option(
    "--requirements",
    metavar="FILE",
    type=click.Path(),
    help="The agent's Python dependencies (else its PEP 723 header).",
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Who runs it in the sandbox, by name or number; else root.")
@click.option(
    "-i", "--interactive", is_flag=True, help="Standard input goes to the program, with -t; else it is empty."
)
@click.option(
    "-t", "--tty", is_flag=True, help="Give the program this terminal, with -i; the run ends when this client does."
)
@click.option(
    "-d", "--detach", is_flag=True, help="Print the trajectory's id and leave; `snapshotd attach` follows it."
)
@click.option(
    "--reuse", is_flag=True, help="Answer its tool calls from earlier runs that began in the same way and did the same."
)
@click.option("--reuse-replies", is_flag=True, help="With --reuse: answer its model requests from them, too.")
@click.option("-q", "--quiet", is_flag=True, help="Only the agent's output: no line per snapshot.")
@wait_option
@json_option
@click.argument(
    "program", metavar="AGENT.py [ARGS]... | NAME [ARGS]... | -- CMD [ARGS]...", nargs=-1, type=click.UNPROCESSED
)
def command(
    ctx: click.Context,
    program: tuple[str, ...],
    requirements: str | Path | None,
    user: str | None,
    interactive: bool,
    tty: bool,
    detach: bool,
    reuse: bool,
    reuse_replies: bool,
    quiet: bool,
    wait: Wait | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run an agent or a command in a sandbox, with a snapshot after every tool call.

    The agent is a Python file of this machine; it and its folder are not mounted: --workspace copies a folder in. Its
    output goes to standard output and error as it comes, one line per snapshot to standard error. The exit code is the
    agent's; 125 when snapshotd failed, 126 and 127 when the command cannot be run or is not there, 130 after Ctrl-C,
    which stops the sandbox after a last snapshot; 141 when the reader of its output goes away (`| head`), which does
    the same. The agent's standard input is empty.
    With -it, a command or a known agent has this terminal, as with `exec -it`: keys reach it as they are pressed. When
    it ends, the sandbox is stopped. `resume` does not start it again; `snapshotd exec -it` goes on in its files.
    NAME is an agent that is known here: claude, codex, gemini, opencode, aider, or a TOML file of yours in ~/.config/snapshotd/agents. Its
    program is installed once, and its model requests go through the gateway.
    --wait stored waits for all its snapshots when the agent has ended; with --detach, for the ones that exist when it
    has started.

    With --reuse a call of a local tool that an earlier run made, from the same image, workspace, environment and
    arguments and after the same calls, is not made again: it has the recorded outcome and files. The first other call
    runs, and everything after it. With --reuse-replies model requests are answered from it as well, at the gateway too.

    With --json: one event per line, the last {"event":"finished","trajectory","exit_code","snapshot_count"}, and with --reuse
    "reuse": {"calls","of"}, and "replies", "replies_of".
    """
    wanted = _parse_program(program, after_dashes(ctx))
    if wanted["agent"] in profiles.names() and not os.path.lexists(wanted["agent"]):
        if options["isolation"] is not None or connect(ctx).status()["mode"] == "folder":
            raise _isolation_missing(wanted["agent"])  # before npm has loaded what it would not run
        profile = profiles.load(wanted["agent"])
        wanted = _agent_command(profile, wanted["args"], options)
        requirements = requirements or profile.requirements()
    if interactive or tty:
        _check_terminal(interactive and tty, wanted, detach or as_json or wait is not None)
        return _run_in_terminal(
            connect(ctx), wanted, user, quiet, {"requirements": requirements, **sandbox_keywords(options)}
        )
    refuse_input("put it into the workspace or an argument, or use `snapshotd create` and `exec -i`")
    if is_local(ctx):
        if wanted["agent"] is not None:
            _check_agent_file(wanted["agent"], wanted["args"])
        if requirements is not None:
            check_file(str(requirements), "requirements file")
        if options["workspace"] is not None:
            check_folder(options["workspace"], "workspace")
    if reuse_replies and not reuse:
        refuse("--reuse-replies goes with --reuse; give both")
    client = connect(ctx)
    keywords = sandbox_keywords(options)
    make_image(client, keywords, None if quiet else note)
    if options["isolation"] is None and not quiet and not places().is_root:
        _note_weaker(client)
    with patience():
        trajectory = client.run(
            **wanted,
            requirements=requirements,
            user=user,
            detach=detach,
            reuse=reuse,
            reuse_replies=reuse_replies,
            **keywords,
        )
    if detach:
        state = {} if wait is None else {"state": wait_for_head(client, trajectory.id, wait)}
        print_answer({"trajectory": trajectory.id, **state}, trajectory.id, as_json=as_json)
        return 0
    return follow(client, trajectory.id, as_json=as_json, quiet=quiet, stop_on_interrupt=True, wait=wait)


def _check_terminal(both: bool, wanted: dict[str, Any], elsewhere: bool) -> None:
    if not both:
        refuse("a program gets standard input and a terminal together; write -it, or leave out -i and -t")
    if wanted["agent"] is not None:
        refuse("an agent file has no terminal; leave out -it, or run it as a command, after `--`")
    if not is_terminal():
        refuse("standard input is no terminal, so a program cannot have it as one; leave out -it")
    if elsewhere:
        refuse(
            "a program with a terminal has standard output for itself; leave out -it, or --detach, --json and --wait"
        )


def _run_in_terminal(
    client: Snapshotd, wanted: dict[str, Any], user: str | None, quiet: bool, rest: dict[str, Any]
) -> int:
    """Run one command that has this terminal, in a sandbox without an agent."""
    make_image(client, rest, None if quiet else note)
    with patience():
        trajectory, _ = client.create(program=wanted.get("program"), **rest)
    options: dict[str, Any] = {"stdin": standard_input(), "env": {}, "user": user}
    try:
        return exec_in_terminal(client, trajectory.id, None, wanted["command"], options, quiet).exit_code
    finally:
        client.stop(trajectory.id)


def _isolation_missing(name: str) -> Unsupported:
    """Return the error of a known agent in a plain folder. The daemon refuses it too (`engine/runs/folder_mode.py`), but only
    after the program is installed."""
    return Unsupported(
        f"a known agent's program needs a sandbox with isolation, and this one is a plain folder: install {name} here, and run it "
        f"as a command: `snapshotd run --isolation none -- {name}`"
    )


def _agent_command(profile: AgentProfile, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the command of a known agent. Adds the agent's environment and provider to options that do not name them."""
    provider = profile.provider(dict(options["providers"]))
    if provider is not None:
        options["providers"] = (*options["providers"], (provider, ""))
    given = dict(options["env"])
    options["env"] = (*((name, value) for name, value in profile.env if name not in given), *options["env"])
    command = [*profile.command, *args]
    return {"agent": None, "args": [], "command": command, "program": profile.install(note)}


def _check_agent_file(path: str, args: list[str]) -> None:
    """Check the agent file. UsageError: there is none; the error has the line for what the user probably meant, which is a
    command, or an image as with docker."""
    if path.endswith(".py") or os.path.lexists(path):
        check_file(path, "agent file")
        return
    advice = f"a command is run by `snapshotd run -- {shlex.join([path, *args])}`"
    if args:
        advice += f", one in an image by `snapshotd run --image {shlex.quote(path)} -- {shlex.join(args)}`"
    refuse(f"there is no agent file {path} here; {advice}")


def _note_weaker(client: Snapshotd) -> None:
    """Say in one line what an ordinary user's daemon lacks."""
    weaker = client.status().get("weaker")
    if weaker:
        note(f"without root: {weaker}")


def _parse_program(program: tuple[str, ...], after: list[str] | None) -> dict[str, Any]:
    """Parse `AGENT.py [ARGS]`, whose ARGS may contain `--`, or `-- CMD [ARGS]`."""
    if program:
        args = [*program[1:], *([] if after is None else ["--", *after])]
        return {"agent": program[0], "args": args, "command": []}
    if not after:
        refuse(
            "there is nothing to run: name an agent file, or a command after `--`; `snapshotd run --help` shows both"
        )
    return {"agent": None, "args": [], "command": after}
