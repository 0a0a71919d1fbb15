"""The server of `snapshotd mcp` over HTTP with what the scenarios of `@modelcontextprotocol/conformance` ask of a server
besides: `python mcp_everything.py STATE_DIR PORT`. The transport, its checks and the dispatch of tools are the product's; the
tools `test_...`, the prompts and the resources `test://...` are here. The runner sends no token, so it is put in on the
way.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from typing import Annotated, Any, Literal

import uvicorn
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp_types import (
    AudioContent,
    Completion,
    EmbeddedResource,
    ImageContent,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

from snapshotd.client import AsyncSnapshotd
from snapshotd.integrations.mcp import transports
from snapshotd.integrations.mcp.server import McpOptions, SnapshotdServer

TOKEN = "conformance" * 4
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAVE = base64.b64encode(
    b"RIFF\x26\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\x02\0\0\0\0\0"
).decode()


def embedded(uri: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type="text/plain", text=text))


def image() -> ImageContent:
    return ImageContent(type="image", data=PIXEL, mime_type="image/png")


def add_tools(server: SnapshotdServer) -> None:
    @server.tool(description="A simple text")
    async def test_simple_text() -> TextContent:
        return TextContent(type="text", text="This is a simple text response for testing.")

    @server.tool(description="An image")
    async def test_image_content() -> ImageContent:
        return image()

    @server.tool(description="A sound")
    async def test_audio_content() -> AudioContent:
        return AudioContent(type="audio", data=WAVE, mime_type="audio/wav")

    @server.tool(description="A resource")
    async def test_embedded_resource() -> EmbeddedResource:
        return embedded("test://embedded-resource", "This is an embedded resource content.")

    @server.tool(description="Several")
    async def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
        text = TextContent(type="text", text="Multiple content types test:")
        return [text, image(), embedded("test://mixed-content-resource", '{"test":"data","value":123}')]

    @server.tool(description="Three log messages")
    async def test_tool_with_logging(ctx: Context) -> str:
        for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.log("info", message)  # type: ignore[deprecated]
            await asyncio.sleep(0.05)
        return "done"

    @server.tool(description="An error")
    async def test_error_handling() -> str:
        raise ToolError("This tool intentionally returns an error for testing")

    @server.tool(description="Progress")
    async def test_tool_with_progress(ctx: Context) -> str:
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100, f"Completed step {done} of 100")
            await asyncio.sleep(0.05)
        return "done"

    @server.tool(description="Sampling")
    async def test_sampling(prompt: str, ctx: Context) -> str:
        asked = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
        result = await ctx.session.create_message([asked], max_tokens=100)  # type: ignore[deprecated]
        return f"LLM response: {getattr(result.content, 'text', '')}"

    @server.tool(description="Reconnection")
    async def test_reconnection(ctx: Context) -> str:
        await ctx.close_sse_stream()
        await asyncio.sleep(0.1)
        return "Reconnection test completed successfully. If you received this, the client properly reconnected."

    @server.tool(description="JSON Schema 2020-12")
    async def json_schema_2020_12_tool(name: str = "") -> str:
        return name

    found = server._tool("json_schema_2020_12_tool").parameters
    found.clear()
    found.update(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": {
                "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
            },
            "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
            "additionalProperties": False,
        }
    )


class UserForm(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Defaults(BaseModel):
    name: str = Field(default="John Doe", description="User name")
    age: int = Field(default=30, description="User age")
    score: float = Field(default=95.5, description="User score")
    status: Literal["active", "inactive", "pending"] = Field(default="active", description="User status")
    verified: bool = Field(default=True, description="Verification status")


TITLED = [{"const": f"value{n}", "title": f"{word} Option"} for n, word in enumerate(("First", "Second", "Third"), 1)]
OPTIONS = ["option1", "option2", "option3"]
ENUMS: dict[str, Any] = {
    "untitledSingle": {"type": "string", "description": "Select one option", "enum": OPTIONS},
    "titledSingle": {"type": "string", "description": "Select one option with titles", "oneOf": TITLED},
    "legacyEnum": {
        "type": "string",
        "description": "Select one option (legacy)",
        "enum": ["opt1", "opt2", "opt3"],
        "enumNames": ["Option One", "Option Two", "Option Three"],
    },
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": OPTIONS}, "minItems": 1, "maxItems": 3},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}, "minItems": 1, "maxItems": 3},
}


def add_questions(server: SnapshotdServer) -> None:
    @server.tool(description="Elicitation")
    async def test_elicitation(message: str, ctx: Context) -> str:
        result = await ctx.elicit(message, UserForm)
        return f"User response: action={result.action}"

    @server.tool(description="Elicitation with defaults")
    async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
        result = await ctx.elicit("Please review and update the form fields with defaults", Defaults)
        return f"Elicitation completed: action={result.action}"

    @server.tool(description="Elicitation with enums")
    async def test_elicitation_sep1330_enums(ctx: Context) -> str:
        schema = {"type": "object", "properties": ENUMS, "required": []}
        result = await ctx.session.elicit_form("Please select options", schema, ctx.request_id)
        return f"Elicitation completed: action={result.action}"


def add_rest(server: SnapshotdServer) -> None:
    @server.resource("test://static-text", mime_type="text/plain", description="A text")
    async def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png", description="Bytes")
    async def static_binary() -> bytes:
        return base64.b64decode(PIXEL)

    @server.resource("test://template/{id}/data", mime_type="application/json", description="A template")
    async def templated(id: str) -> str:  # noqa: A002 - the scenario's name
        return f'{{"id":"{id}","templateTest":true,"data":"Data for ID: {id}"}}'

    @server.prompt(description="A prompt")
    async def test_simple_prompt() -> str:
        return "This is a simple prompt for testing."

    @server.prompt(description="With arguments")
    async def test_prompt_with_arguments(
        arg1: Annotated[str, Field(description="First")], arg2: Annotated[str, Field(description="Second")]
    ) -> str:
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @server.prompt(description="With a resource")
    async def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:  # noqa: N803 - the scenario's name
        return [
            UserMessage(embedded(resourceUri, "Embedded resource content for testing.")),
            UserMessage("Please process the embedded resource above."),
        ]

    @server.prompt(description="With an image")
    async def test_prompt_with_image() -> list[Message]:
        return [UserMessage(image()), UserMessage("Please analyze the image above.")]

    @server.completion()
    async def complete(_ref: Any, _argument: Any, _context: Any) -> Completion:
        return Completion(values=["paris", "park", "party"], total=3, has_more=False)


def main() -> None:
    state_dir, port = sys.argv[1], int(sys.argv[2])
    server = SnapshotdServer(AsyncSnapshotd(state_dir), McpOptions())
    add_tools(server)
    add_questions(server)
    add_rest(server)
    app: Any = transports.http_app(server, port, TOKEN)

    async def with_token(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", f"Bearer {TOKEN}".encode())]}
        await app(scope, receive, send)

    uvicorn.run(with_token, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
