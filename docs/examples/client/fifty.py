"""Fifty sandboxes in one process, under asyncio."""

import asyncio
import threading

from snapshotd.client import AsyncSandbox


async def work(number: int) -> int:
    async with await AsyncSandbox.create() as sandbox:
        await sandbox.files.write("number", f"{number}\n")
        done = await sandbox.exec("read n < number; echo $((n * n))", check=True)
    await sandbox.remove()
    return int(done.stdout)


async def main() -> None:
    squares = await asyncio.gather(*map(work, range(50)))
    print(sum(squares), "is the sum of", len(squares), "squares")
    print(threading.active_count(), "thread")


asyncio.run(main())
