"""Follow a command's output while it runs, end it, and look at its files, under asyncio."""

import asyncio

from snapshotd.client import AsyncSandbox


async def main() -> None:
    async with await AsyncSandbox.create() as sandbox:
        counting = await sandbox.exec(
            "for i in 1 2 3; do echo $i | tee -a out; done; exec cat", background=True, stdin=True
        )
        async for line in counting.lines(follow=True):
            print(line, "while it runs")
            if line == "3":
                break
        await counting.write("the end\n", end=True)
        print((await counting.wait()).stdout.splitlines(), "in all")
        print((await sandbox.files.read_text("out")).split(), "in its file")
    await sandbox.remove()


asyncio.run(main())
