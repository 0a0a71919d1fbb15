"""Calls that wait for a person, asked at the MCP client.

The policy (docs/policy.md) decides about a tool's call as about an agent's. A call that needs a person is a pending
approval of the daemon, under a name that is made of the call and of the head that it was made at: the same call again finds
it, and nothing has to be kept here. A client that can ask its user is asked to (elicitation); with the newest protocol the
question is the call's answer, and the client repeats the call with the reply. Otherwise the call fails with the command
that decides, and the client repeats it after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable

import anyio
from mcp.server.elicitation import render_elicitation_schema
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult, InputRequiredResult
from mcp_types.version import is_version_at_least
from pydantic import BaseModel, Field, ValidationError

from snapshotd.api.approvals import ApprovalInfo
from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, Denied, SnapshotdError

_INPUT_REQUIRED = "2026-07-28"
"""The protocol's first version in which a question is an answer, and the call is repeated."""
_SHOWN_CHARS = 8000
_REASON_CHARS = 2000
_LOOK_S = 0.5
"""Seconds between two looks whether somebody has decided elsewhere."""
Ask = Callable[[], Awaitable[ApprovalInfo | None]]


class ApprovalForm(BaseModel):
    approve: bool = Field(description="True lets the call run, exactly as shown; false refuses it.")
    reason: str | None = Field(default=None, description="Why; the model is told, if it is refused.")


class PersonsAnswers:
    """Asks about the calls of one server. `elicits`: at the client; else people decide elsewhere."""

    def __init__(self, client: AsyncSnapshotd, *, elicits: bool) -> None:
        self._client, self._elicits = client, elicits

    async def admit(
        self, context: Context, trajectory: str, tool: str, arguments: Json, at: str
    ) -> Json | InputRequiredResult:
        """The arguments to run the call with: these, or what the person put in their place. An `InputRequiredResult` is for
        the client. `at` names the moment: the head, or the call's key. Denied, with what to do next."""
        told = json.dumps([tool, arguments, at], sort_keys=True)
        call = f"mcp-{hashlib.blake2b(told.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"

        async def ask() -> ApprovalInfo | None:
            return await self._client.ask(trajectory, call, tool, arguments)

        approval = await ask()
        if approval is not None and approval.status == "pending":
            reply = await self._reply(context, approval, ask)
            if isinstance(reply, InputRequiredResult):
                return reply
            if reply is not None:
                await self._decide(context, approval, reply)
            approval = await ask()
        if approval is None:
            return arguments
        if approval.status == "approved":
            return approval.edited[0] if approval.edited else arguments
        raise _refusal(approval)

    async def _reply(
        self, context: Context, approval: ApprovalInfo, ask: Ask
    ) -> ElicitResult | InputRequiredResult | None:
        """The client's reply to a question. None: the client asks nobody, or has not understood the question, or somebody has decided
        elsewhere."""
        capabilities = context.client_capabilities
        if not self._elicits or capabilities is None or capabilities.elicitation is None:
            return None
        given = (context.input_responses or {}).get(approval.id)
        if isinstance(given, ElicitResult):
            return given
        params = ElicitRequestFormParams(
            message=_question(approval), requested_schema=render_elicitation_schema(ApprovalForm)
        )
        if is_version_at_least(context.protocol_version or "", _INPUT_REQUIRED):
            return InputRequiredResult(input_requests={approval.id: ElicitRequest(params=params)})
        return await self._elicit(context, params, ask)

    async def _elicit(self, context: Context, params: ElicitRequestFormParams, ask: Ask) -> ElicitResult | None:
        """The client's answer. The question is taken back when somebody decides elsewhere meanwhile."""
        reply: ElicitResult | None = None
        async with anyio.create_task_group() as group:

            async def look() -> None:
                with contextlib.suppress(SnapshotdError):  # the caller asks again, and gets it
                    while (now := await ask()) is not None and now.status == "pending":
                        await anyio.sleep(_LOOK_S)
                group.cancel_scope.cancel()

            group.start_soon(look)
            with contextlib.suppress(MCPError, ValidationError):  # the client's own failure is no decision
                reply = await context.session.elicit_form(
                    params.message, params.requested_schema, related_request_id=context.request_id
                )
            group.cancel_scope.cancel()
        return reply

    async def _decide(self, context: Context, approval: ApprovalInfo, reply: ElicitResult) -> None:
        """Decide an approval by the client's reply. A decision that was made elsewhere meanwhile stays, and a question that the
        person closed stays open."""
        content = reply.content or {}
        client = context.session.client_params
        name = client.client_info.name if client is not None and client.client_info is not None else "a client"
        by = "".join(char for char in f"a person at {name}"[:100] if char.isprintable())
        reason = content.get("reason")  # a client may send anything
        why = reason[:_REASON_CHARS] or None if isinstance(reason, str) else None
        try:
            if reply.action == "accept" and content.get("approve") is True:
                await self._client.approve(approval.id, by=by, reason=why)
            elif reply.action in ("accept", "decline"):
                await self._client.deny(approval.id, by=by, reason=why)
        except Conflict:
            pass  # the caller looks at the decision that came first


def _question(approval: ApprovalInfo) -> str:
    arguments = json.dumps(approval.arguments, indent=1, ensure_ascii=False)
    if len(arguments) > _SHOWN_CHARS:
        arguments = f"{arguments[:_SHOWN_CHARS]}\n... cut here: `snapshotd approval {approval.id[:12]}` shows all of it"
    why = f"\nWhy you are asked: {approval.question}" if approval.question else ""
    return (
        f"May `{approval.name}` run in {approval.trajectory[:12]}, with exactly these arguments?\n{arguments}{why}\n"
        f"Approval {approval.id[:12]}, digest {approval.digest}"
    )


def _refusal(approval: ApprovalInfo) -> Denied:
    short, why = approval.id[:12], f": {approval.reason}" if approval.reason else ""
    if approval.status == "pending":
        return Denied(
            f"a person has to decide about this call of {approval.name} first, and nobody has here: `snapshotd approve {short}` or "
            f"`snapshotd deny {short}` decides (digest {approval.digest}); make the same call again after that"
        )
    return Denied(
        f"this call of {approval.name} did not run, because its approval {short} is {approval.status} by {approval.by or 'nobody'}{why}; "
        "do something else, or ask the person"
    )
