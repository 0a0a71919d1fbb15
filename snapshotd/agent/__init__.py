"""The library an agent uses inside its sandbox: standard library only, Python 3.8 and later, nothing else of snapshotd.

    from snapshotd.agent import tool, message

    @tool
    def edit(path, text):
        ...

    message("user", "repair the parser")

`tool` makes a function a recorded tool call: its intent is recorded before it runs, its outcome after, and then the
call waits ("is parked") while the daemon takes one snapshot of files, conversation and call. `model` records model
calls. `message` appends to the conversation, `messages` returns it (a fork's begins with what it inherited),
`checkpoint` takes a named snapshot without a tool call. `state` holds JSON that is saved with each snapshot, `task`
names parts of the work, `now`, `random`, `randint`, `seed` and `uuid` are recorded, `approve` asks a person, `store`
outlives the run.

A program that is started again in a resumed or forked sandbox runs from its top: recorded calls are answered from the
record, until it reaches a call that is not recorded yet. So it has to do the same again up to there: any input from
outside (time, chance, files it did not make) goes through a tool or a fact.

Outside a sandbox the same program runs unchanged: nothing is recorded, and one line on stderr says so.

Files, from the surface down: tools.py (`tool`), models.py (`model`), subtasks.py (`task`, `tasks`), conversation.py
(`message`, `messages`, `checkpoint`), states.py (`state`), facts.py (`now`, ...), approvals.py (`approve`), keyvalue.py
(`store`); calls.py (one call, its intent and outcome), spec.py (facts about a tool before it is called), replay.py
(records as outcomes); session.py (this process's requests), parking.py (open files and working directory while the root
is switched), link.py (connections that outlive a daemon), connection.py (bytes on the socket), values.py (Python values
to JSON), terminal.py (approvals outside of a sandbox). compensate.py runs the function that undoes a call. command.py
and holder.py are `snapshotd-agent`, the same for programs in other languages. The protocol is in
docs/agent-protocol.md.
"""

from snapshotd.agent.approvals import Approval, approve
from snapshotd.agent.calls import current_call, emit, record_usage
from snapshotd.agent.conversation import checkpoint, message, messages
from snapshotd.agent.facts import now, randint, random, seed, uuid
from snapshotd.agent.keyvalue import store
from snapshotd.agent.models import model
from snapshotd.agent.replay import ReplayedError
from snapshotd.agent.states import state
from snapshotd.agent.subtasks import task, tasks
from snapshotd.agent.tools import tool
from snapshotd.agent.wire.connection import Denied, SnapshotdError, SnapshotdUnavailable

__all__ = [
    "Approval",
    "Denied",
    "ReplayedError",
    "SnapshotdError",
    "SnapshotdUnavailable",
    "approve",
    "checkpoint",
    "current_call",
    "emit",
    "message",
    "messages",
    "model",
    "now",
    "randint",
    "random",
    "record_usage",
    "seed",
    "state",
    "store",
    "task",
    "tasks",
    "tool",
    "uuid",
]
