"""The commands of docs/fleet.md for operators are true: backup and restore of the whole, and an upgrade of one node after the
other. They are read from the page and run by a shell, over real daemons, PostgreSQL and an S3 service."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.engine.host import doctor
from snapshotd.errors import Conflict, NotFound, Unavailable
from tests import s3_service
from tests.capabilities import require
from tests.e2e import forked_command
from tests.node_rig import Fleet, await_that
from tests.postgres_server import PROGRAMS, PostgresServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"
AGENT = ["sh", "-c", "test -e begun || echo begun > begun; while :; do sleep 0.05; done"]
NODES = ("node-1", "node-2")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two nodes over a server and a bucket of their own, by the names that the page uses."""
    require("postgres")
    with (
        tempfile.TemporaryDirectory(prefix="ops-") as name,
        s3_service.running() as endpoint,
        closing(PostgresServer()) as server,
    ):
        server.ask("CREATE ROLE snapshotd LOGIN")
        made = Fleet(server, Path(name), "snapshotd", user="snapshotd")
        bucket(endpoint).create_bucket(Bucket="snapshotd")
        made.store = f"s3://snapshotd?endpoint={endpoint}"
        try:
            for node in NODES:
                made.begin(node)
            yield made
        finally:
            made.close()


def bucket(endpoint: str) -> Any:
    return boto3.client("s3", endpoint_url=endpoint)


class Page:
    """A chapter's commands, with this fleet's places in the place of the page's."""

    def __init__(self, fleet: Fleet, title: str) -> None:
        chapter = PAGE.read_text().split(f"### {title}\n")[1].split("\n### ")[0]
        blocks: list[str] = re.findall(r"```\n(.*?)```", chapter, re.DOTALL)
        self.blocks = [block.splitlines() for block in blocks]
        self._fleet = fleet
        self._folder = fleet.directory / "operator"
        (self._folder / "backup").mkdir(parents=True)
        forked_command.install(self._folder)

    def run(self, command: str) -> str:
        """What it prints. It has to succeed."""
        places = {
            "postgresql://snapshotd@db.example.com/snapshotd": f"'{self._fleet.url}'",
            "/var/lib/snapshotd": str(self._fleet.directory / NODES[0] / "state"),
        }
        for place, own in places.items():
            command = command.replace(place, own)
        server, endpoint = self._fleet.server, self._fleet.store.partition("endpoint=")[2]
        environment = {
            **{
                name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"
            },  # Debian's rclone fails on it
            "PATH": f"{self._folder}:{PROGRAMS}:{os.environ['PATH']}",
            "PGHOST": str(server.folder),
            "PGUSER": "postgres",
            "RCLONE_CONFIG_BUCKET_TYPE": "s3",
            "RCLONE_CONFIG_BUCKET_PROVIDER": "Other",
            "RCLONE_CONFIG_BUCKET_ENV_AUTH": "true",
            "RCLONE_CONFIG_BUCKET_ENDPOINT": endpoint,
            "RCLONE_CONFIG_BACKUP_TYPE": "alias",
            "RCLONE_CONFIG_BACKUP_REMOTE": str(self._folder / "backup"),
        }
        done = subprocess.run(
            ["bash", "-c", command], cwd=self._folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    @property
    def key(self) -> Path:
        """The copy of the repository's key."""
        return self._folder / "backup" / "key"


def write(box: Sandbox, word: str) -> str:
    """The snapshot after this word was added to a file."""
    assert box.exec(["sh", "-c", f"echo {word} >> file"]).exit_code == 0
    return box.head().id


def read(client: Snapshotd, snapshot: str) -> str:
    return b"".join(client.cat(snapshot, "/workspace/file")).decode()


def line(client: Snapshotd, trajectory: str) -> list[str]:
    return [one.id for one in client.log(trajectory)]


def publish(client: Snapshotd, *trajectories: str) -> None:
    for one in trajectories:
        client.flush(one, published=True)


def resume(client: Snapshotd, trajectory: str) -> None:
    """As soon as the node may."""

    def resumed() -> bool:
        try:
            client.resume(trajectory)
        except (Conflict, Unavailable):
            return False
        return True

    await_that(resumed, f"{trajectory} is not resumed")


@pytest.mark.long  # an upgrade, below, has the same nodes, bucket and database
def test_the_whole_is_restored_into_empty_state_directories(fleet: Fleet) -> None:
    require("rclone")
    page = Page(fleet, "Backup and restore of the whole")
    one, two = (fleet.nodes[node].client for node in NODES)
    boxes = [Sandbox.create(client=client) for client in (one, two)]
    heads = {write(box, word): f"{word}\n" for box, word in zip(boxes, ("north", "south"), strict=True)}
    agents = [client.run(command=AGENT, detach=True) for client in (one, two)]
    for client, box, agent in zip((one, two), boxes, agents, strict=True):
        Sandbox.connect(agent.id, client=client).snapshot()
        publish(client, box.id, agent.id)

    backup, restore = page.blocks
    page.run(backup[0])
    late = write(boxes[0], "late")  # between the copies of the database and the bucket
    publish(one, boxes[0].id)
    for command in backup[1:]:
        page.run(command)
    lost = write(boxes[0], "lost")
    publish(one, boxes[0].id)

    fleet.close()
    lose_everything(fleet)
    for node in NODES:
        shutil.rmtree(fleet.directory / node)
    for command in restore:
        page.run(command)
    one, two = (fleet.begin(node, key=page.key).client for node in NODES)

    for client in (one, two):
        await_that(lambda client=client: client.status()["node_state"] == "leased", "the node has no lease")
        assert {head: read(client, head) for head in heads} == heads
        for gone in (late, lost):
            with pytest.raises(NotFound):
                client.snapshot(gone)
        assert client.check(read_data=True).damages == ()
    for head, text in heads.items():
        for client in (one, two):
            fork = Sandbox.connect(head, client=client).fork()[0]
            more = write(fork, "fork")
            publish(client, fork.id)
            assert {read(each, more) for each in (one, two)} == {f"{text}fork\n"}
    resume(one, agents[0].id)
    box = Sandbox.connect(boxes[0].id, client=one)
    for number in range(3):  # what its node owned goes on there, and the other one follows
        head = write(box, f"again{number}")
        publish(one, box.id)
        await_that(
            lambda head=head: line(two, box.id) == line(one, box.id) and head in line(two, box.id), "it stays behind"
        )
    assert read(two, head) == "north\nagain0\nagain1\nagain2\n"
    assert fleet.owner(box.id) == ("node-1", 2, 3), "it was taken over, since nothing of it was there"
    fleet.ask("UPDATE snapshotd_fleet.nodes SET draining = true WHERE node = 'node-2'")
    resume(one, agents[1].id)  # nobody has asked node 2 for it since the restore


def lose_everything(fleet: Fleet) -> None:
    """The bucket and the database."""
    client = bucket(fleet.store.partition("endpoint=")[2])
    for each in client.list_objects_v2(Bucket="snapshotd")["Contents"]:
        client.delete_object(Bucket="snapshotd", Key=each["Key"])
    client.delete_bucket(Bucket="snapshotd")
    client.close()
    fleet.server.ask("DROP DATABASE snapshotd")


@pytest.mark.long  # crash/test_fleet_node.py has the next daemon of a node
def test_an_agent_goes_on_while_the_other_node_is_upgraded(fleet: Fleet) -> None:
    page = Page(fleet, "Rolling upgrade")
    drain, status, upgrade, end = page.blocks[0]
    one, two = (fleet.nodes[node].client for node in NODES)
    moved, stays = one.run(command=AGENT, detach=True), two.run(command=AGENT, detach=True)
    removed = Sandbox.create(client=one)
    removed.remove(force=True)
    before = Sandbox.connect(stays.id, client=two).snapshot().id

    page.run(drain)

    def nothing_left() -> bool:
        shown = page.run(status)
        row = next(line.split() for line in shown.splitlines() if line.startswith("node-1 "))
        columns = next(line for line in shown.splitlines() if "TRAJECTORIES" in line).split()
        return row[1] == "draining" and (row[3 + 1], row[-1]) == ("0", "0") and columns[-1] == "LAG"

    await_that(nothing_left, "the node does not hand over")
    with pytest.raises(Conflict, match="node node-1 drains"):
        Sandbox.create(client=one)
    resume(two, moved.id)
    assert upgrade.startswith("pip install --upgrade 'snapshotd[fleet,s3]' && systemctl restart snapshotd ")
    old = fleet.nodes["node-1"]
    assert old.terminate() == 0
    old.close()
    one = fleet.begin("node-1").client
    with pytest.raises(Conflict, match="node node-1 drains"):  # the new daemon drains as the old one did
        Sandbox.create(client=one)
    page.run(end)
    await_that(lambda: one.status()["node_state"] == "leased", "the node drains still")

    after = Sandbox.connect(stays.id, client=two).snapshot().id
    publish(two, stays.id)
    assert two.trajectory(stays.id).status == two.trajectory(moved.id).status == "running"
    assert {before, after} <= set(line(one, stays.id)), "the new daemon reads what was published meanwhile"
    assert Sandbox.connect(after, client=one).fork()[0].exec(["ls"]).stdout == "begun\n"


@pytest.mark.long  # unit/engine/test_doctor.py has a daemon without a fleet
def test_the_doctor_of_a_node_looks_at_what_the_node_needs(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL, the bucket, and how much of it the disk keeps."""
    one, two = (fleet.nodes[node].client for node in NODES)
    box = Sandbox.create(client=one)
    box.files.write("file", os.urandom(300_000))
    one.flush(box.id, published=True)
    two.restore(box.id, fleet.directory / "restored")
    monkeypatch.setenv("SNAPSHOTD_FLEET", fleet.url)
    monkeypatch.setenv("SNAPSHOTD_STORE", fleet.store)
    monkeypatch.setenv("SNAPSHOTD_NODE", "node-2")

    def look() -> dict[str, tuple[bool | None, str]]:
        return {one.name: (one.ok, one.detail) for one in doctor._fleet(fleet.nodes["node-2"].state_dir)}

    usage = two.usage()
    assert usage.cache_bytes >= 300_000
    found = look()
    assert {name: ok for name, (ok, _) in found.items()} == {"fleet": True, "bucket": True, "cache": True}
    assert found["fleet"][1].startswith("PostgreSQL answers; node node-2 holds its lease for ")
    assert (
        f"{usage.cache_bytes / (1 << 20):.1f} MiB of {usage.cache_budget_bytes / (1 << 20):,.1f} MiB"
        in found["cache"][1]
    )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("SNAPSHOTD_STORE", f"s3://snapshotd?endpoint=http://{nowhere}")
    found = look()
    assert (found["fleet"][0], found["bucket"][0]) == (True, False)
    assert f"s3://snapshotd?endpoint=http://{nowhere} does not answer" in found["bucket"][1]
    monkeypatch.setenv("SNAPSHOTD_STORE", fleet.store.replace("//snapshotd?", "//empty?"))
    assert look()["bucket"][0] is False, "there is no such bucket"
    bucket(fleet.store.partition("endpoint=")[2]).create_bucket(Bucket="empty")
    assert look()["bucket"][0] is None, "no fleet has begun there"
    monkeypatch.setenv("SNAPSHOTD_STORE", (absent := fleet.directory / "absent").as_uri())
    assert (look()["bucket"][0], absent.exists()) == (None, False), "a look changes nothing"
    monkeypatch.setenv("SNAPSHOTD_STORE", "")
    assert look()["bucket"] == (False, "SNAPSHOTD_STORE is not set")

    monkeypatch.setenv("SNAPSHOTD_FLEET", f"postgresql://postgres@{nowhere}/fleet")
    monkeypatch.setenv("SNAPSHOTD_NODE_CACHE", "0")
    found = look()
    assert (found["fleet"][0], found["cache"][0]) == (False, None)
    monkeypatch.delenv("SNAPSHOTD_FLEET")
    assert look() == {}
