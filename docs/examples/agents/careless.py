"""What a replay cannot do: a number that nobody recorded decides what a tool is called with."""

import os
import signal

from snapshotd.agent import SnapshotdError, tool


@tool
def draw(number):
    return number


try:
    draw(os.urandom(8).hex())
    os.kill(os.getpid(), signal.SIGKILL)
except SnapshotdError as error:
    print(type(error).__name__)
