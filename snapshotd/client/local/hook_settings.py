"""The settings by which agents run snapshotd's hooks: written into files that the agents' users may have filled already.

Only entries that run our program are added or taken away; everything else stays as it is. The file of a project is the
one that is not shared with others, where the agent has such a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import snapshotd
from snapshotd.config import read_variables
from snapshotd.errors import Conflict, NotPermitted, UsageError

PROGRAM = Path(snapshotd.__file__).parent / "hooks" / "send.py"
WORKTREE = PROGRAM.with_name("worktree.py")
_MARKS = ("hooks/send.py", "hooks/worktree.py")
"""A command with one of these in it is ours, of whatever installation."""
LONGEST_S = 60


@dataclass(frozen=True, slots=True)
class HookedAgent:
    """An agent with hooks: the file of a folder, the file of a user (in the directory that `home` names), and the
    events, each with True where the agent takes a pattern for the tool's name."""

    name: str
    file: str
    user_file: str
    home: str
    directory: str
    events: tuple[tuple[str, bool], ...]
    timeout: int = LONGEST_S
    worktrees: tuple[tuple[str, str], ...] = ()
    """Events of worktrees, each with the word for our program."""
    note: str | None = None


_TOOLS = (("PreToolUse", True), ("PostToolUse", True))
_TALK = (("SessionStart", False), ("UserPromptSubmit", False))
AGENTS = {
    agent.name: agent
    for agent in (
        HookedAgent(
            "claude",
            ".claude/settings.local.json",
            "settings.json",
            "CLAUDE_CONFIG_DIR",
            ".claude",
            (*_TALK, *_TOOLS, ("PostToolUseFailure", True), ("SessionEnd", False)),
            worktrees=(("WorktreeCreate", "create"), ("WorktreeRemove", "remove")),
        ),
        HookedAgent(
            "codex",
            ".codex/hooks.json",
            "hooks.json",
            "CODEX_HOME",
            ".codex",
            (*_TALK, *_TOOLS),
            note="Codex runs a new hook only after you have trusted it there (/hooks)",
        ),
        HookedAgent(
            "gemini",
            ".gemini/settings.json",
            "settings.json",
            "GEMINI_CLI_HOME",
            ".gemini",
            (("SessionStart", False), ("BeforeAgent", False), ("BeforeTool", True), ("AfterTool", True)),
            timeout=LONGEST_S * 1000,
        ),
    )
}
"""Sources: the reference of hooks of each agent. Gemini counts milliseconds."""

COMMANDS = {
    "rewind": ("Go back to a snapshot of this folder", "[--files|--conversation|--both] [--dry-run] [ID]"),
    "undo": ("Take the last rewind back", ""),
    "checkpoint": ("Name the folder as it is now", "NAME"),
}
"""Slash commands of Claude Code, which has a `/rewind` and a `/checkpoint` of its own: ours begin with `snapshotd-`."""


@dataclass(frozen=True, slots=True)
class HookSettings:
    """The settings of one agent for a folder, or for all folders of a user (`folder` None)."""

    agent: HookedAgent
    socket: Path
    folder: Path | None
    worktrees: bool = False

    @property
    def file(self) -> Path:
        """The file with the settings; a link to one stays a link."""
        if self.folder is not None:
            return (self.folder / self.agent.file).resolve()
        return (self._home / self.agent.user_file).resolve()

    @property
    def _home(self) -> Path:
        given = read_variables([self.agent.home]).get(self.agent.home)
        return Path(given) if given else Path.home() / self.agent.directory

    def install(self) -> bool:
        """Add what is missing. False: nothing was. Conflict: the file is none that could be added to; nothing is changed
        then. NotPermitted."""
        settings = self._read()
        before = json.dumps(settings)
        hooks = settings.setdefault("hooks", {})
        if not isinstance(hooks, dict) or not all(isinstance(groups, list) for groups in hooks.values()):
            raise Conflict(f"{self.file} has hooks in a form that is not known; add ours by hand, or move it away")
        _take_out(hooks)
        for event, groups in self.groups().items():
            hooks.setdefault(event, []).extend(groups)
        for event, word in self.agent.worktrees if self.worktrees else ():
            command = shlex.join([sys.executable, "-I", "-S", str(WORKTREE), word])
            hooks.setdefault(event, []).append({"hooks": [{"type": "command", "command": command, "timeout": 600}]})
        changed = json.dumps(settings) != before
        if changed:
            self._write(self.file, json.dumps(settings, indent=2) + "\n")
        for path, text in self._commands():
            if not path.exists() or path.read_text() != text:
                self._write(path, text)
                changed = True
        return changed

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The entries of every event but those of worktrees."""
        entry = {"type": "command", "command": self.command, "timeout": self.agent.timeout}
        return {
            event: [{**({"matcher": "*"} if has_matcher else {}), "hooks": [entry]}]
            for event, has_matcher in self.agent.events
        }

    def remove(self) -> bool:
        """Take out what `install` added. False: there was nothing. Conflict, NotPermitted."""
        settings = self._read()
        before = json.dumps(settings)
        if isinstance(settings.get("hooks"), dict):
            _take_out(settings["hooks"])
            if not settings["hooks"]:
                del settings["hooks"]
        changed = json.dumps(settings) != before
        if changed and settings:
            self._write(self.file, json.dumps(settings, indent=2) + "\n")
        elif changed:
            self.file.unlink()
        for path, _ in self._commands():
            if path.exists():
                path.unlink()
                changed = True
                with contextlib.suppress(OSError):  # there is more in one of them
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
        return changed

    def installed(self) -> bool:
        """True if every event of the agent runs our program, with this daemon's socket."""
        hooks = self._read().get("hooks")
        return isinstance(hooks, dict) and all(
            any(_ours(entry) and entry["command"] == self.command for entry in _entries(hooks.get(event)))
            for event, _ in self.agent.events
        )

    @property
    def command(self) -> str:
        """The shell command of a hook. It ends with 0 even if there is no such program any more."""
        return f"{self._program} hook {self.agent.name} || true"

    @property
    def _program(self) -> str:
        return shlex.join([sys.executable, "-I", "-S", str(PROGRAM), str(self.socket)])

    def _commands(self) -> list[tuple[Path, str]]:
        if self.agent.name != "claude":
            return []
        place = (self._home if self.folder is None else self.folder / ".claude") / "commands"
        found = []
        for name, (says, hint) in COMMANDS.items():
            lines = [
                "---",
                f"description: {says}",
                f"argument-hint: {json.dumps(hint)}",
                f"allowed-tools: Bash({sys.executable}:*)",
                "disable-model-invocation: true",
                "---",
                f"!`{self._program} {name} $ARGUMENTS`",
                "",
                "Repeat the lines above to the user, and do nothing else.",
                "",
            ]
            found.append((place / f"snapshotd-{name}.md", "\n".join(lines)))
        return found

    def _read(self) -> dict[str, Any]:
        try:
            text = self.file.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as exc:
            raise NotPermitted(f"{self.file} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
        try:
            settings = json.loads(text) if text.strip() else {}
        except ValueError as exc:
            raise Conflict(f"{self.file} is no JSON ({exc}); repair it, then try again") from None
        if not isinstance(settings, dict):
            raise Conflict(f"{self.file} is no JSON object; repair it, then try again")
        return settings

    def _write(self, path: Path, text: str) -> None:
        """The whole file, or nothing of it. Its mode stays."""
        if path.exists() and not path.is_file():
            raise NotPermitted(f"{path} cannot be written: it is no regular file; move it away")
        new = path.with_name(f".{path.name}.snapshotd-new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
            with open(fd, "w") as file:
                file.write(text)
            new.rename(path)
        except OSError as exc:
            raise NotPermitted(f"{path} cannot be written: {exc.strerror}") from exc


def settings_of(agent: str, socket: Path, folder: Path | None, *, worktrees: bool = False) -> HookSettings:
    """UsageError: no such agent or folder, an agent without hooks for worktrees, or a folder of another user, whose settings
    root must not write."""
    if agent not in AGENTS:
        raise UsageError(f"no hooks of {agent[:40]!r} are known; choose {', '.join(AGENTS)}")
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; give the one in which the agent works")
        if folder.stat().st_uid != os.geteuid():
            raise UsageError(
                f"{folder} belongs to another user; run this command as that user, who needs no rights for it"
            )
        folder = folder.resolve()
    if worktrees and not AGENTS[agent].worktrees:
        raise UsageError(f"{agent} has no hooks for worktrees; claude has")
    return HookSettings(AGENTS[agent], socket, folder, worktrees)


def _entries(groups: Any) -> list[dict[str, Any]]:
    found = []
    for group in groups if isinstance(groups, list) else ():
        entries = group.get("hooks") if isinstance(group, dict) else None
        found += [entry for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, dict)]
    return found


def _ours(entry: dict[str, Any]) -> bool:
    return any(mark in str(entry.get("command", "")) for mark in _MARKS)


def _take_out(hooks: dict[str, Any]) -> None:
    """Remove our entries, and what is empty then."""
    for event in list(hooks):
        kept = []
        for group in hooks[event] if isinstance(hooks[event], list) else ():
            own = _entries([group])
            if any(map(_ours, own)):
                group = {**group, "hooks": [entry for entry in own if not _ours(entry)]}
                if not group["hooks"]:
                    continue
            kept.append(group)
        if kept:
            hooks[event] = kept
        elif hooks[event]:
            del hooks[event]
