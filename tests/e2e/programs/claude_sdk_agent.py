"""Claude Code through the Claude Agent SDK, with sessions in the catalog. Its argument is JSON; it prints JSON: the session, and
the `uuid` of each message with a tool's result, or the error of the options."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, get_session_messages_from_store, query

from snapshotd.errors import SnapshotdError
from snapshotd.integrations.claude_agent import SnapshotdSessionStore

given: dict[str, Any] = json.loads(sys.argv[1])
store = SnapshotdSessionStore()


async def results(session: str) -> list[str]:
    found = await get_session_messages_from_store(store, session, directory=given["cwd"])
    return [one.uuid for one in found if "tool_result" in json.dumps(one.message)]


async def main() -> None:
    if "snapshot_at" in given:
        _, snapshot = await store.snapshot_at(given["cwd"], *given["snapshot_at"])
        sys.stdout.write(json.dumps({"snapshot": snapshot}) + "\n")
        return
    options = ClaudeAgentOptions(
        cwd=given["cwd"],
        model="claude-sonnet-4-5",
        permission_mode="bypassPermissions",
        **{name: given[name] for name in ("resume", "fork_session", "resume_session_at") if name in given},
    )
    session, seen = "", 0
    try:
        options = await store.options(options)
    except SnapshotdError as exc:
        sys.stdout.write(json.dumps({"refused": [type(exc).__name__, exc.message]}) + "\n")
        return
    async for message in query(prompt=given["wish"], options=options):
        session = getattr(message, "session_id", None) or (getattr(message, "data", None) or {}).get(
            "session_id", session
        )
        content = getattr(message, "content", None)
        if isinstance(content, list) and any(hasattr(block, "tool_use_id") for block in content):
            seen += 1
            if seen == given.get("die_after"):
                while len(await results(session)) < seen:
                    await asyncio.sleep(0.01)
                sys.stdout.write(json.dumps({"session": session}) + "\n")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write(json.dumps({"session": session, "results": await results(session)}) + "\n")


asyncio.run(main())
