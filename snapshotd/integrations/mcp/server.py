"""The server: the tools that a client gets, and the way of a call through it.

    arguments ─► checked ─► admitted (a person is asked, where the policy says so) ─► made, once under its key ─► answer

An error of ours is an answer with `isError` whose text is one sentence: what, on which thing, why, and what to do next.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, InputRequiredResult, TextContent
from pydantic import ValidationError

from snapshotd import __version__
from snapshotd.api import operations
from snapshotd.api.operation import READ
from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.exchange import use_keys
from snapshotd.client.outcomes import argv_or_shell
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.integrations.mcp.approvals import PersonsAnswers
from snapshotd.integrations.mcp.branches import BranchTools
from snapshotd.integrations.mcp.hands import HandTools
from snapshotd.integrations.mcp.history import HistoryTools
from snapshotd.integrations.mcp.reach import Reach
from snapshotd.integrations.mcp.resources import add_resources
from snapshotd.integrations.mcp.tools import ToolRow

INSTRUCTIONS = """\
Sandboxes whose every change is one snapshot. Work with `exec` and `write_file`; each answer names the snapshot after it. \
When something went wrong, `rewind` to an earlier one (`log` lists them): files are then exactly as they were, and you still \
know what you learnt. To test without keeping anything: `try`. To go several ways at once: `fork`, then `compare` or `score`, \
and `promote` the best. `bisect` finds the call that broke something."""
_KEY = {
    "type": "string",
    "maxLength": 200,
    "description": "A text that no other call has, such as a random one. The call is made once under it: repeat a call whose "
    "answer was lost with the same key.",
}


@dataclass(frozen=True, slots=True)
class McpOptions:
    """`only`: id of the one trajectory that tools touch. `read_only`: no tool that changes or runs anything. `unisolated`:
    also sandboxes without isolation, and new ones are such. `network`: of new sandboxes. `elicits`: a person at the client
    is asked about calls that wait for one."""

    only: str | None = None
    read_only: bool = False
    unisolated: bool = False
    network: str = "none"
    elicits: bool = True


class SnapshotdServer(MCPServer[Any]):
    """An MCP server over one daemon. It keeps nothing between calls."""

    def __init__(self, client: AsyncSnapshotd, options: McpOptions) -> None:
        super().__init__(
            "snapshotd", title="snapshotd", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
        )
        self._reach = Reach(client, options.only, options.unisolated)
        self._asking = PersonsAnswers(client, elicits=options.elicits)
        self._rows: dict[str, ToolRow] = {}
        for kind in (HandTools, HistoryTools, BranchTools):
            for _, method in inspect.getmembers(kind(self._reach, options.network), inspect.ismethod):
                row: ToolRow | None = getattr(method, "row", None)
                if row is not None and _is_offered(row, options):
                    self._offer(method.__name__.rstrip("_"), method, row)
        add_resources(self, self._reach)

    def _offer(self, name: str, method: Any, row: ToolRow) -> None:
        description = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(method.__doc__))
        self.add_tool(method, name=name, description=description, annotations=row.annotations)
        self._rows[name] = row
        schema = self._tool(name).parameters
        schema["additionalProperties"] = False
        if row.operation.once:
            schema["properties"]["key"] = _KEY
        if self._reach.only is not None and "trajectory" in schema.get("required", ()):
            schema["required"].remove("trajectory")
            schema["properties"]["trajectory"]["default"] = self._reach.only

    def _tool(self, name: str) -> Tool:
        found = self._tool_manager.get_tool(name)
        assert found is not None
        return found

    async def call_tool(
        self, name: str, arguments: Json, context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool. Every error is an answer, but for the protocol's own."""
        row = self._rows.get(name)
        if row is None or context is None:
            return await super().call_tool(name, arguments, context)
        try:
            checked, key = self._check(name, arguments)
            subject = await self._subject(row, checked)
            admitted = await self._admit(name, checked, subject, key, context)
            if isinstance(admitted, InputRequiredResult):
                return admitted
            with use_keys(f"{name} {subject and subject[0]} {key}") if key is not None else contextlib.nullcontext():
                return await super().call_tool(name, admitted, context)
        except SnapshotdError as exc:
            return _failure(exc)
        except ToolError as exc:
            if isinstance(exc.__cause__, SnapshotdError):
                return _failure(exc.__cause__)
            if isinstance(exc.__cause__, ValidationError):
                return _failure(_wrong(name, exc.__cause__))
            raise  # a defect: the SDK logs it, and tells the client no more than that

    def _check(self, name: str, arguments: Json) -> tuple[Json, str | None]:
        """Check the arguments. Returns them with those that the server adds, and the call's key apart. UsageError."""
        found = self._tool(name)
        properties = found.parameters["properties"]
        if unknown := sorted(arguments.keys() - properties.keys()):
            raise UsageError(f"`{name}` has no argument `{unknown[0]}`; its arguments are {', '.join(properties)}")
        given = dict(arguments)
        key = given.pop("key", None)
        if key is not None and not (isinstance(key, str) and 1 <= len(key) <= _KEY["maxLength"]):  # type: ignore[operator]
            raise UsageError(f"`key` of `{name}` has to be a text of 1 to {_KEY['maxLength']} characters; make one up")
        if self._reach.only is not None and "trajectory" in properties:
            given.setdefault("trajectory", self._reach.only)
        try:
            found.fn_metadata.validate_arguments(given)  # before a person is asked about them
        except ValidationError as exc:
            raise _wrong(name, exc) from exc
        return given, key

    async def _subject(self, row: ToolRow, arguments: Json) -> tuple[str, str] | None:
        """The trajectory that a call is about, and its head, or the snapshot that was named."""
        if row.subject is None:
            return None
        named = arguments[row.subject]
        if row.subject in ("trajectory", "into"):
            info = await self._reach.trajectory(named)
            return info.id, info.head
        snapshot = await self._reach.snapshot(named[0] if isinstance(named, list) else named)
        return snapshot.trajectory, snapshot.id

    async def _admit(
        self, name: str, arguments: Json, subject: tuple[str, str] | None, key: str | None, context: Context[Any, Any]
    ) -> Json | InputRequiredResult:
        """Let the call through with the arguments that it may have. Denied. A command is asked about as the tool `exec`, whichever tool
        runs it, so that one rule of the policy is enough."""
        if subject is None:
            return arguments
        trajectory, head = subject
        if "command" not in arguments:
            return await self._asking.admit(context, trajectory, name, arguments, key or head)
        more = {"cwd": arguments["cwd"]} if arguments.get("cwd") is not None else {}
        asked = {"argv": argv_or_shell(arguments["command"]), **more}
        allowed = await self._asking.admit(context, trajectory, "exec", asked, key or head)
        if isinstance(allowed, InputRequiredResult) or allowed is asked:
            return arguments if allowed is asked else allowed
        return {**arguments, "command": allowed.get("argv"), "cwd": allowed.get("cwd", arguments.get("cwd"))}


def _is_offered(row: ToolRow, options: McpOptions) -> bool:
    """True if clients get a tool. With `only`, a fork alone makes another trajectory."""
    if options.read_only and row.operation.scope != READ:
        return False
    return options.only is None or row.operation not in (operations.CREATE, operations.RUN_AGENT)


def _failure(error: SnapshotdError) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=f"{error.code}: {error.message}")],
        structured_content=error.as_json(),
        is_error=True,
    )


def _wrong(name: str, found: ValidationError) -> UsageError:
    """The first thing that is wrong with a call's arguments."""
    first = found.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the arguments"
    message = first["msg"]
    return UsageError(
        f"`{where}` of `{name}` cannot be used: {message[:1].lower()}{message[1:]}; send it as its schema says"
    )
