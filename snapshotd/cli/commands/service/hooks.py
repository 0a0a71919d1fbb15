"""`snapshotd hooks install|remove|status`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from snapshotd.api.wire import hook_socket_of
from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.text import print_json, table
from snapshotd.client.autostart import answers
from snapshotd.client.local import hook_settings
from snapshotd.client.local.hook_settings import HookSettings

_folder = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
_agent = click.argument("agent", type=click.Choice(list(hook_settings.AGENTS)))
_user = click.option("--user", "for_user", is_flag=True, help="In your own settings, for all folders.")


@declare_group("hooks")
def command() -> None:
    """Let an agent in your own folder take a snapshot at every call, without a sandbox.

    Agents: claude, codex, gemini. Their hooks tell the daemon of each call; what it changed in the folder becomes a
    snapshot. Files that git ignores, and those that a .snapshotdignore names, are left out. `snapshotd rewind` brings
    files and conversation back; in Claude Code, so does /snapshotd-rewind.
    """


@declare("install", group=command, examples=["snapshotd hooks install claude", "snapshotd hooks install codex --user"])
@_user
@click.option("--worktrees", is_flag=True, help="Worktrees that the agent asks for have all files of the folder.")
@json_option
@_agent
@_folder
def install(
    ctx: click.Context, agent: str, folder: Path | None, for_user: bool, worktrees: bool, as_json: bool
) -> None:
    """Write the hooks into an agent's settings.

    FOLDER is the one in which the agent works; else the working directory. Other settings stay as they are. Run it as
    the user who runs the agent. With --worktrees, each worktree is a copy of the folder as it is, files that git ignores
    included, which shares its data where the file system can. With --json: {"name","file","written","note"}.
    """
    settings = _settings(ctx, agent, folder, for_user, worktrees)
    changed = settings.install()
    if as_json:
        print_json({**_json(settings), "written": changed, "note": settings.agent.note})
        return
    click.echo(str(settings.file))
    if settings.agent.note is not None:
        click.echo(settings.agent.note, err=True)


@declare("remove", group=command, examples=["snapshotd hooks remove claude"])
@_user
@json_option
@_agent
@_folder
def remove(ctx: click.Context, agent: str, folder: Path | None, for_user: bool, as_json: bool) -> None:
    """Take the hooks out of an agent's settings.

    Snapshots stay. With --json: {"name","file","written"}.
    """
    settings = _settings(ctx, agent, folder, for_user)
    changed = settings.remove()
    if as_json:
        print_json({**_json(settings), "written": changed})
    elif changed:
        click.echo(str(settings.file))


@declare("status", group=command, examples=["snapshotd hooks status"])
@_user
@json_option
@_folder
def status(ctx: click.Context, folder: Path | None, for_user: bool, as_json: bool) -> int:
    """Show which agents have the hooks, and if the daemon hears them.

    Exit code 1 if the daemon does not. With --json: {"heard","agents":[{"name","file","installed"}]}.
    """
    found = [_settings(ctx, agent, folder, for_user) for agent in hook_settings.AGENTS]
    hears = answers(found[0].socket)
    rows = [{**_json(one), "installed": one.installed()} for one in found]
    if as_json:
        print_json({"heard": hears, "agents": rows})
    else:
        shown = [(row["name"], "installed" if row["installed"] else "-", row["file"]) for row in rows]
        table(("AGENT", "HOOKS", "FILE"), shown)
        click.echo(f"the daemon {'hears' if hears else 'does not hear'} hooks on {found[0].socket}", err=True)
    return 0 if hears else 1


def _settings(
    ctx: click.Context, agent: str, folder: Path | None, for_user: bool, worktrees: bool = False
) -> HookSettings:
    socket_path = hook_socket_of(connect(ctx, autostart=False).state_dir)
    return hook_settings.settings_of(
        agent, socket_path, None if for_user else folder or Path.cwd(), worktrees=worktrees
    )


def _json(settings: HookSettings) -> dict[str, Any]:
    return {"name": settings.agent.name, "file": str(settings.file)}
