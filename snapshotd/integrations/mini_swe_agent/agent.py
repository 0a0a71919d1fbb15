"""Agents that go on from any call of a saved trajectory, with its conversation and its files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from minisweagent.agents.default import AgentConfig, DefaultAgent
from minisweagent.agents.interactive import InteractiveAgent, InteractiveAgentConfig

from snapshotd.integrations.mini_swe_agent.environment import MiniEnvironment


class _Resume(AgentConfig):
    """`resume`: a trajectory that was saved. `resume_at`: the snapshot of a call there, or the beginning of its id; else
    the last call."""

    resume: Path | None = None
    resume_at: str = ""


class _SnapshotdAgentConfig(_Resume): ...


class _SnapshotdInteractiveAgentConfig(_Resume, InteractiveAgentConfig): ...


class _Resuming(DefaultAgent):
    env: MiniEnvironment
    _earlier: list[dict[str, Any]] | None = None

    def run(self, task: str = "", **kwargs: Any) -> dict[str, Any]:
        """With `resume`: go on behind that call, in a fork of its snapshot. ValueError: there is no such call."""
        if self.config.resume is not None:
            saved = json.loads(self.config.resume.read_text())
            self._earlier, snapshot = cut(saved, self.config.resume_at)
            self.env.fork(snapshot)
            asked = [one for one in self._earlier if one.get("role") == "assistant" or one.get("object") == "response"]
            self.n_calls = len(asked)
            self.cost = sum(one.get("extra", {}).get("cost", 0.0) for one in asked)
        return super().run(task, **kwargs)

    def add_messages(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages that a run begins with are those of the trajectory that it goes on from."""
        earlier, self._earlier = self._earlier, None
        return super().add_messages(*(messages if earlier is None else earlier))

    def save(self, path: Path | None, *extra_dicts: dict[str, Any]) -> dict[str, Any]:
        """As always, but a process that is killed leaves the file as it was before, or as it is then."""
        data = super().save(None, *extra_dicts)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(data, indent=2))
            os.replace(part, path)
        return data


class SnapshotdAgent(_Resuming):
    """mini-swe-agent's `DefaultAgent`, which can go on from a saved trajectory."""

    def __init__(self, *args: Any, config_class: type = _SnapshotdAgentConfig, **kwargs: Any) -> None:
        super().__init__(*args, config_class=config_class, **kwargs)


class SnapshotdInteractiveAgent(_Resuming, InteractiveAgent):
    """The agent of the command `mini`, which can go on from a saved trajectory."""

    def __init__(self, *args: Any, config_class: type = _SnapshotdInteractiveAgentConfig, **kwargs: Any) -> None:
        super().__init__(*args, config_class=config_class, **kwargs)


def cut(saved: dict[str, Any], at: str) -> tuple[list[dict[str, Any]], str]:
    """The messages of a saved trajectory up to the call with this snapshot, and the snapshot. ValueError."""
    messages: list[dict[str, Any]] = saved["messages"]
    named = {place: _snapshot_of(one) for place, one in enumerate(messages) if one.get("role") != "exit"}
    found = [place for place, snapshot in named.items() if snapshot and snapshot.startswith(at)]
    if not found or (at and len(found) > 1):
        what = "no call has" if not found else "several calls have"
        raise ValueError(f"{what} a snapshot that begins with {at!r} in that trajectory")
    last = found[-1]
    if named.get(last + 1):
        raise ValueError(f"the call of {at!r} is one of several of a message; go back to the last of them")
    return messages[: last + 1], str(named[last])


def _snapshot_of(message: dict[str, Any]) -> str | None:
    found: str | None = message.get("extra", {}).get("snapshot")
    return found
