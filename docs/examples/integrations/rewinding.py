"""The calls that a rewinding agent makes, made by hand over the protocol."""

import asyncio

from mcp import Client, StdioServerParameters


async def main() -> None:
    async with Client(StdioServerParameters(command="snapshotd", args=["mcp"])) as client:

        async def call(tool: str, **arguments: object) -> dict:
            return (await client.call_tool(tool, arguments)).structured_content

        box = (await call("create", name="job"))["id"]
        good = await call("exec", trajectory=box, command="mkdir app && echo ok > app/config && cat app/config")
        print("built:", good["stdout"].strip())
        await call("exec", trajectory=box, command="rm -r app")
        broken = await call("exec", trajectory=box, command="cat app/config")
        print("broken: exit code", broken["exit_code"])
        await call("rewind", trajectory=box, to=good["snapshot"])
        print("back:", (await call("exec", trajectory=box, command="cat app/config"))["stdout"].strip())
        for step in (await call("log", trajectory=box))["snapshots"]:
            print(step["seq"], step["tool"]["name"], step["tool"]["status"])
        await call("stop", trajectory=box)


asyncio.run(main())
