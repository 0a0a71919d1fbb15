"""What the tests of `snapshotd.integrations.mcp` share: clients, and what they get. The SDK takes a second to import, so that
is done where it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from snapshotd.client import AsyncSnapshotd

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

MODES = ("legacy", "auto")
"""The protocol's handshake, and its newest version, in which a question is the answer to a call."""


class Spoken:
    """A client, and what its tools answer."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        """The structured answer of a call that succeeds."""
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, text_of(result)
        assert json.loads(text_of(result)) == result.structured_content
        return result.structured_content

    async def fails(self, tool: str, **arguments: Any) -> tuple[str, str]:
        """Kind and sentence of a call that fails."""
        result = await self.client.call_tool(tool, arguments)
        assert result.is_error, result
        text = text_of(result)
        assert "Traceback" not in text
        assert "\n" not in text
        error = (result.structured_content or {})["error"]
        assert text == f"{error['code']}: {error['message']}"
        return error["code"], error["message"]

    async def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in (await self.client.list_tools()).tools}


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    text: str = content.text  # type: ignore[union-attr]
    return text


def server_over(client: AsyncSnapshotd, **options: Any) -> Any:
    """A server that also takes sandboxes without isolation, as the small daemon's are."""
    from snapshotd.integrations.mcp.server import McpOptions, SnapshotdServer

    return SnapshotdServer(client, McpOptions(**{"unisolated": True, **options}))


@asynccontextmanager
async def speaking(to: Any, **more: Any) -> AsyncIterator[Spoken]:
    """A client of a server: an object, an address, or how to start one."""
    from mcp import Client

    async with Client(to, **more) as client:
        yield Spoken(client)


async def until(found: Callable[[], Awaitable[bool]], what: str, seconds: float = 30) -> None:
    """Wait until something is so."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not await found():
        assert asyncio.get_running_loop().time() < deadline, f"not in {seconds} s: {what}"
        await asyncio.sleep(0.02)
