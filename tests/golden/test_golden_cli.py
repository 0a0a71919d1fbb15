"""The state directory of an older version behind a daemon of today: the command line shows everything in them, whatever
bytes its text has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.client import Snapshotd
from snapshotd.repo.key import load_key
from snapshotd.types import new_id
from tests.e2e.support import Snap
from tests.golden import make_catalog
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc
HERE = Path(__file__).parent


@pytest.fixture(params=make_catalog.OLDER)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def content(version: int) -> dict[str, Any]:
    return make_catalog.expected(version)


@pytest.fixture
def snap(tmp_path: Path, version: int) -> Iterator[Snap]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    shutil.copyfile(HERE / f"catalog-v{version}.db", state / "catalog.db")
    SqliteCatalog(":memory:").close()  # loads the checksums of pages
    connection = apsw.Connection(str(state / "catalog.db"))
    connection.execute(
        "UPDATE meta SET value = ? WHERE key = 'instance'", (new_id()[:12],)
    )  # two of them may be served at once
    connection.close()
    (state / "repo").mkdir(mode=0o700)
    load_key(state / "repo")  # a catalog with trajectories and no repository is refused
    (state / "repo" / "store" / "packs").mkdir(parents=True)  # so is one with stored snapshots and no folder of packs
    snap = Snap(state)
    yield snap
    snap.stop_daemon()
    nothing_left(state, running=False)


def test_everything_is_shown(snap: Snap, content: dict[str, Any]) -> None:
    snapshots, lines = content["snapshots"], content["trajectories"]
    texts = {one["id"]: (one["call"]["name"], one["call"]["arguments"], one["call"]["status"]) for one in snapshots}
    shown = {one["id"]: one["tool"] for line in snap.json("tree") for one in line["snapshots"]}
    assert {key: (tool["name"], tool["arguments"], tool["status"]) for key, tool in shown.items()} == texts
    drawn = snap("tree", "--no-trunc").stdout
    assert all(one["id"] in drawn for one in snapshots)
    strange = next(one for one in snapshots if "\\ud8" in json.dumps(one["call"]))
    assert strange["id"] in snap("log", "--all", "--no-trunc", strange["trajectory"]).stdout
    assert snap.json("show", strange["id"])["tool"]["error"] == strange["call"]["error"]
    assert snap("show", strange["id"], code=None).stdout.startswith(
        f"snapshot     {strange['id']}\n"
    )  # there is no repository here
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    for one in snapshots:
        said = [{"role": message.role, "content": message.content} for message in client.conversation(one["id"])]
        assert said == content["conversations"][one["id"]]
        client.state(one["id"])
        assert len(list(client.journal(one["id"]))) >= len(content["entries"][one["id"]])
        client.tasks(one["id"])
    for line in lines:
        client.effects(line["id"])
    assert [(one.id, one.reason) for one in client.approvals()] == [
        (one["id"], one["reason"]) for one in content["approvals"]
    ]
    assert {one.id for one in client.images()} == {one["id"] for one in content["images"]}
    assert "\ud800" in [one.value for one in client.value_history("notes", "key")]
