"""A small daemon that has something of everything, and a command line for every command."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from snapshotd.types import new_id
from tests.unit.daemon.process import Daemon

EXPERIMENT = """\
from = "{}"
program = ["true"]
[variants.a]
env.X = "1"
[variants.b]
env.X = "2"
[score]
command = ["true"]
"""


class World:
    """Trajectories with something of everything."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        client = self.client = daemon.client
        self.folder = folder
        self.first = client.create(name="box")[1].id
        client.exec("box", ["effect", "send"])
        client.exec("box", ["snapshotd-agent", "message", "user", "fix it"])
        client.exec("box", ["plan", "plan", "build"])
        client.tag("box", "tagged")
        self.fork = client.fork(self.first).trajectories[0].id
        client.exec(self.fork, ["ls"])
        for asking in client.fork(self.first, 2).trajectories:
            client.ask(asking.id, new_id(), "deploy", question="really?")
        self.approvals = [one.id for one in client.approvals("pending")]
        client.exec("box", ["fail", "1", "x"])
        client.exec("box", ["sh", "-c", r"touch $(printf 'a\377')"])
        client.create(name="spare")
        client.run(command=["ls"], name="ran", detach=True)
        for _ in client.events("ran"):
            pass
        client.run(command=["forever"], name="halted", detach=True)
        client.stop("halted")
        self._make_experiment()
        for name in ("work", "mounted"):
            (folder / name).mkdir()
        with tarfile.open(folder / "root.tar", "w") as tar:
            tar.add(__file__, "etc/file")
        (folder / "work" / "new").write_text("new")
        client.export_file("spare", folder / "bundle")

    def _make_experiment(self) -> None:
        _, first = self.client.create(name="tried")
        file = self.folder / "ways.toml"
        file.write_text(EXPERIMENT.format(first.id))
        self.client.run_experiment(file)

    def lines(self) -> Iterator[str]:
        """Command lines, each command at least once. Those that end something come last."""
        first, fork, folder = self.first, self.fork, self.folder
        yield from (
            "run -- echo it",
            "run -d -- ls",
            "create",
            "exec box -- ls",
            "snapshot box",
            "exec -d box -- forever",
        )
        yield f"kill box {self.client.commands('box')[0].id}"
        yield from (
            f"cp {folder}/work/new box:new",
            f"cp box:new {folder}/copied",
            "attach ran",
            "logs ran",
            "wait ran",
        )
        yield from ("ls", "ps", "ps box", "fork box", "fork ran --n 2 --parallel 1 --resume", "resume -d halted")
        yield from (f"experiment {word} ways" for word in ("status", "compare", "promote", "stop"))
        yield from ("experiment ls", f"experiment run {folder}/ways.toml")
        yield from ("image build minimal --name tiny", f"image import {folder}/root.tar --name imported", "image ls")
        yield from (
            "find ls",
            "stats",
            "log box",
            "tree",
            "show box",
            "show --conversation box",
            "inspect box tagged",
            "diff box",
        )
        yield from ("diff --patch box", f"compare box {fork}", "score box -- ls", "cat box:new", "journal box")
        yield from ("state box", "tasks box", "tag box other", "tag --list", "tag --if true box third")
        yield from ("tag --delete third", "retry --no-resume box plan", f"rewind --preview box {first}")
        yield from (f"rewind --yes box {first}", "undo box", "effects box", "compensate box", f"promote --yes {fork}")
        yield from (f"edit {first} --state a=1", "approvals", f"approval {self.approvals[0]}")
        yield from (f"approve {self.approvals[0]}", f"deny {self.approvals[1]}", "store put n k 1", "store get n k")
        yield from ("store ls n", "store history n k", "store rm n k", f"restore box --to {folder}/out")
        yield f"apply {first} --to {folder}/work --base {first}"
        yield from (
            "exec box -- raw ff00",
            f"export box --cache {folder}/cache --key k",
            f"import --cache {folder}/cache --key k",
        )
        yield from (f"export box -o {folder}/exported", f"import {folder}/bundle", f"mount {folder}/mounted")
        yield from (
            f"umount {folder}/mounted",
            "df",
            "token create laptop --scope run",
            "token list",
            "token revoke laptop",
            "audit",
            "policy box",
            "prune --dry-run",
            "prune --force",
            "check",
            "repair",
        )
        yield from (f"hooks {word} claude {folder}" for word in ("install", "remove"))
        yield from (f"hooks status {folder}", "doctor", "setup", "version", "stop spare", "rm spare", "image rm tiny")
        yield "experiment rm ways"
