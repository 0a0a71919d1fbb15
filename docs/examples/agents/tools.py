"""Tools: what is recorded of them, what a failure looks like, two calls side by side."""

import asyncio
import subprocess

from snapshotd.agent import checkpoint, message, state, tool


@tool
def write(path, text):
    with open(path, "w") as file:
        return file.write(text)


@tool
def compiles(path):
    subprocess.run(["python3", "-m", "py_compile", path], check=True, capture_output=True)


@tool
async def lines(path):
    await asyncio.sleep(0)
    with open(path) as file:
        return len(file.readlines())


async def both():
    return await asyncio.gather(lines("good.py"), lines("bad.py"))


message("user", "write two programs and say which one compiles")
write("good.py", "print('hello')\n")
write("bad.py", "print('hello'\n")
state["written"] = ["good.py", "bad.py"]
checkpoint("both written")
for path in state["written"]:
    try:
        compiles(path)
        print(path, "compiles")
    except subprocess.CalledProcessError as error:
        print(path, "does not:", error.returncode)
print(asyncio.run(both()))
message("assistant", "good.py does")
