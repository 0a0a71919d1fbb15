"""Words that people type by habit, from docker, git and sandbox services, and what to type here instead.

A word that becomes a command leaves this table. `tests/unit/cli/test_habits.py` runs every word, and checks that each
command line named here exists.
"""

from __future__ import annotations

_EACH_CALL = (
    "a snapshot is taken after every tool call by itself; `snapshotd snapshot NAME` takes one now, `snapshotd tag NAME TAG` names "
    "the newest"
)
_BACK = "`snapshotd rewind NAME ID` goes back in place, `snapshotd fork ID` starts a new sandbox from there"
_STOP = "`snapshotd stop NAME` ends a sandbox after a last snapshot"
_START = (
    "`snapshotd exec NAME CMD` starts a stopped sandbox again, `snapshotd resume NAME` lets its agent go on, and "
    "`snapshotd create` makes a new one"
)
_SHOW = (
    "`snapshotd inspect ID` prints all about a trajectory or a snapshot, `snapshotd show ID` shows a snapshot to people"
)

_ADVICE: dict[str, str] = {
    "abort cancel terminate": _STOP,
    "add checkpoint": _EACH_CALL,
    "agents containers list sandboxes trajectories": "`snapshotd ls` lists trajectories, `snapshotd ps` live sandboxes",
    "backup save": "`snapshotd export NAME --trajectory -o FILE` writes a trajectory as one file, `snapshotd import FILE` takes it in",
    "bash connect enter sh ssh": "`snapshotd shell NAME` opens a shell, `snapshotd exec -i -t NAME CMD` runs one command in a terminal",
    "branch": "`snapshotd fork ID` starts a new sandbox from a snapshot; `snapshotd tree` shows what was forked from what",
    "branches": "`snapshotd tree` shows what was forked from what",
    "build": "`snapshotd image build RECIPE` builds an image",
    "chat conversation messages": "`snapshotd show --conversation ID` prints the conversation up to a snapshot",
    "checkout reset rollback switch": _BACK,
    "clean cleanup gc": "`snapshotd prune` frees what no policy keeps, `snapshotd rm NAME` forgets a trajectory",
    "clone": "`snapshotd fork NAME` starts a new sandbox from a trajectory's newest snapshot",
    "commit": f"{_EACH_CALL}, `snapshotd export ID --format oci -o FILE` makes an image of it",
    "config": "settings are options of each command and variables of the environment; `snapshotd daemon --status` shows the daemon's",
    "continue": "`snapshotd resume NAME` lets an agent go on where it stopped",
    "copy download upload": "`snapshotd cp` copies files into a sandbox and out of it",
    "delete destroy drop remove": "`snapshotd rm NAME` forgets a trajectory and frees what only it used",
    "describe get": _SHOW,
    "events": "`snapshotd attach --json NAME` prints the events of a run, one JSON object per line",
    "expose ports": "`snapshotd port NAME 8000` reaches a server inside a sandbox at a local address",
    "files": "`snapshotd diff ID` lists what a snapshot changed, `snapshotd exec NAME ls -la` what is there",
    "freeze pause unpause": f"a sandbox cannot be paused; {_STOP}, and `snapshotd exec NAME CMD` starts it again",
    "fsck verify": "`snapshotd check` verifies the repository",
    "help": "`snapshotd --help` lists the commands, `snapshotd run --help` explains one",
    "history snapshots": "`snapshotd log NAME` lists a trajectory's snapshots",
    "images": "`snapshotd image ls` lists images",
    "info": f"{_SHOW}, `snapshotd daemon --status` the daemon",
    "init": "`snapshotd create --workspace DIR --name NAME` makes a sandbox with a copy of a folder",
    "jobs": "`snapshotd ps NAME` lists a sandbox's background commands, `snapshotd ls` trajectories",
    "load": "`snapshotd import FILE` takes in what was exported, `snapshotd image import FILE` what `docker save` wrote",
    "new up": "`snapshotd create` makes a sandbox, `snapshotd run AGENT.py` runs an agent in one",
    "processes": "`snapshotd ps NAME` lists background commands, `snapshotd exec NAME ps aux` all processes in a sandbox",
    "pull": "`snapshotd image import IMAGE` takes an image from Docker or a file",
    "push": "`snapshotd export ID --format oci -o FILE` makes an image of a snapshot, for `docker load` and `docker push`",
    "rename": "a trajectory keeps its name; `snapshotd tag NAME TAG` gives a snapshot another",
    "replay": "`snapshotd resume NAME` replays an agent up to its newest snapshot, `snapshotd fork --resume ID` up to another",
    "restart": f"{_STOP}; {_START}",
    "revert": f"{_BACK}; `snapshotd undo NAME` takes a rewind back",
    "rmi": "`snapshotd image rm IMAGE` removes an image",
    "server": "`snapshotd daemon` runs the daemon; the first command that needs it starts it, too",
    "start": _START,
    "status": "`snapshotd ls` shows the status of trajectories, `snapshotd daemon --status` the daemon's",
    "top": "`snapshotd ps` lists live sandboxes, `snapshotd exec NAME top -bn1` shows the processes in one",
    "trace": "`snapshotd journal NAME` shows what a program did, call by call",
    "unmount": "`snapshotd umount DIR` ends what `snapshotd mount DIR` began",
    "untag": "`snapshotd tag --delete TAG` takes a name away",
    "update": "a sandbox keeps the limits and the network it was made with; `snapshotd create` makes another",
    "volume": "there are no volumes; `snapshotd create --workspace DIR` copies a folder in, and snapshots keep it",
}
"""Words, and what to type in place of each."""
HABITS: dict[str, str] = {word: advice for words, advice in _ADVICE.items() for word in words.split()}
"""Word to advice."""
