"""Follow a command's output while it runs, end it, and look at its files, under asyncio."""

import asyncio

from snapshotd.client import AsyncSandbox


async def main() -> None:
    async with await AsyncSandbox.create() as sandbox:
        counting = await sandbox.exec(
            "for i in 1 2 3; do echo $i | tee -a out; done; exec cat", background=True, stdin=True
        )
        heard = b""
        async for _stream, data in counting.output(follow=True):
            heard += data
            if heard.endswith(b"3\n"):
                break
        print(heard.split(), "while it runs")
        await counting.write("the end\n", end=True)
        print((await counting.wait()).stdout.splitlines(), "in all")
        print((await sandbox.files.read_text("out")).split(), "in its file")
    await sandbox.remove()


asyncio.run(main())
