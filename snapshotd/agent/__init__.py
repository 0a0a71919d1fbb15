"""The library an agent uses inside its sandbox: standard library only, Python 3.8 and later, nothing else of snapshotd.

    from snapshotd.agent import tool, message

    @tool
    def edit(path, text):
        ...

    message("user", "repair the parser")

`tool` makes a function a recorded tool call: its intent is recorded before it runs, its outcome after, and then the call waits
("is parked") while the daemon takes one snapshot of files, conversation and call. `message` appends to the conversation, `messages`
returns it (a fork's begins with what it inherited), `checkpoint` takes a named snapshot without a tool call.

Outside a sandbox the same program runs unchanged: nothing is recorded, and one line on stderr says so.

Files: calls.py (`tool`), conversation.py (`message`, `messages`, `checkpoint`), session.py (this process's connection), parking.py (open
files and working directory while the root is switched), values.py (Python values to JSON), connection.py (bytes on the socket).
The protocol is in docs/agent-protocol.md.
"""

from snapshotd.agent.calls import tool
from snapshotd.agent.connection import SnapshotdError, SnapshotdUnavailable
from snapshotd.agent.conversation import checkpoint, message, messages

__all__ = ["SnapshotdError", "SnapshotdUnavailable", "checkpoint", "message", "messages", "tool"]
