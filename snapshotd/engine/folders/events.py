"""The events that agents tell of, as their hooks get them on standard input: one JSON object each.

Sources: Claude Code's reference of hooks, Codex's (the same form), Gemini CLI's (`BeforeTool` and `AfterTool`, without
an id of the call).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from snapshotd.errors import LimitExceeded

AGENTS = ("claude", "codex", "gemini")
_MOST_CHARS = 4096
Stage = Literal["start", "prompt", "before", "after", "end"]
"""A session began; a person has said something; a call is about to run; it has ended; a turn or the session is over."""
_STAGES: dict[str, Stage] = {
    "SessionStart": "start",
    "UserPromptSubmit": "prompt",
    "BeforeAgent": "prompt",
    "PreToolUse": "before",
    "BeforeTool": "before",
    "PostToolUse": "after",
    "PostToolUseFailure": "after",
    "AfterTool": "after",
    "Stop": "end",
    "AfterAgent": "end",
    "SessionEnd": "end",
}


@dataclass(frozen=True, slots=True)
class HookEvent:
    """One event. `call_id`: the provider's id of the call (None: the agent tells none). `result`: what the tool
    answered; `error`: what it said when it failed. `lane`: the sub-agent that made the call."""

    stage: Stage
    agent: str
    session: str
    transcript: str | None
    cwd: str | None
    tool: str
    arguments: Any
    call_id: str | None
    result: Any
    error: str | None
    lane: str | None


def read(agent: str, payload: Mapping[str, Any]) -> HookEvent | None:
    """The event of a hook's input; None for one that no snapshot is taken for. LimitExceeded: an id or path in it is too
    long."""
    stage = _STAGES.get(_text(payload.get("hook_event_name")) or "")
    if stage is None:
        return None
    response, error = payload.get("tool_response"), payload.get("error")
    if isinstance(response, Mapping) and response.get("error") and error is None:
        error = response["error"]
    failed = payload.get("hook_event_name") == "PostToolUseFailure" or error is not None
    prompt = {"prompt": payload.get("prompt")} if stage == "prompt" else None
    return HookEvent(
        stage=stage,
        agent=agent,
        session=_text(payload.get("session_id")) or "",
        transcript=_text(payload.get("transcript_path")) or None,
        cwd=_text(payload.get("cwd")),
        tool=(_text(payload.get("tool_name")) or "tool")[:256] if stage in ("before", "after") else stage,
        arguments=prompt if stage == "prompt" else payload.get("tool_input"),
        call_id=_text(payload.get("tool_use_id")),
        result=response,
        error=(error if isinstance(error, str) else str(error) if error is not None else "it failed")
        if failed
        else None,
        lane=_text(payload.get("agent_id")),
    )


def _text(value: Any) -> str | None:
    """An id or path: the daemon keeps those in memory."""
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        raise LimitExceeded(f"a hook's input has an id or path of {len(value)} characters; the most are {_MOST_CHARS}")
    return value if isinstance(value, str) else None
