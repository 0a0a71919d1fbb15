"""The API of comparisons, scores, bisections and experiments as any HTTP client sees it: shapes, refusals, bounds."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.wire import FILES_MAX_BYTES
from snapshotd.client.twofold import iterate, run
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.process import Daemon


def _sparse() -> str:
    """A tar of one file of 1 GiB that is all hole."""
    item = tarfile.TarInfo("large")
    item.type, item.size = tarfile.GNUTYPE_SPARSE, 0
    head = bytearray(item.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b"%011o\0%011o\0" % (1 << 30, 0)
    head[483:495] = b"%011o\0" % (1 << 30)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return base64.b64encode(bytes(head) + bytes(1024)).decode()


SPARSE = _sparse()


def experiment(source: str, **more: Any) -> dict[str, Any]:
    described = {"name": "way", "source": source, "variants": [{"label": "a"}], "args": ["true"]}
    return {**described, "score": {"argv": ["true"]}, **more}


def ask(daemon: Daemon, method: str, path: str, body: Any = None) -> Any:
    return run(daemon.client._transport.request(method, path, body=body))


def lines(daemon: Daemon, method: str, path: str, body: Any = None) -> list[dict[str, Any]]:
    return list(iterate(run(daemon.client._transport.lines(method, path, body=body))))


def b64(size: int) -> str:
    return base64.b64encode(bytes(size)).decode()


def test_rows_come_as_they_end_and_the_ranks_last(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    body = {"refs": ["box", "nobody"], "argv": ["true"], "repeat": 2}
    *runs, result = lines(daemon, "POST", "/score", body)
    assert [(one["event"], one["ref"], one["run"]["score"]) for one in runs] == [
        ("run", "nobody", None),
        ("run", "box", 1.0),
        ("run", "box", 1.0),
    ]
    rows = [(row["ref"], row["rank"], row["score"], row["passes"], row["pass_at"]) for row in result["rows"]]
    assert rows == [("box", 1, 1.0, 2, {"1": 1.0, "2": 1.0}), ("nobody", None, None, 0, {"1": 0.0})]
    assert "nobody" in result["rows"][1]["error"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such"], r"command not found: no-such; without isolation .* begin at \$SNAPSHOTD_ROOT"),
        (["/workspace/check"], r"there is no /workspace/check; without isolation .* begin at \$SNAPSHOTD_ROOT"),
        (["sh", "/workspace/check"], r"there is no /workspace/check; without isolation"),
        (["sh", "-c", "no-such"], r"program of the command 'sh' is missing .*\(exit code 127\); .*no-such.*not found"),
        (["sh", "-c", '"$SNAPSHOTD_ROOT/workspace/check"'], r"cannot be run \(exit code 126\)"),
    ],
)
def test_a_program_that_is_not_there_is_no_score_of_0(daemon: Daemon, argv: list[str], said: str) -> None:
    daemon.client.create(name="box")
    daemon.client.exec("box", ["sh", "-c", 'echo exit 0 > "$SNAPSHOTD_ROOT/workspace/check"'])
    (run,) = lines(daemon, "POST", "/score", {"refs": ["box"], "argv": argv})[-1]["rows"][0]["runs"]
    assert run["score"] is None
    assert re.search(said, run["error"])


def test_a_path_of_this_machine_is_one_without_isolation(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    (row,) = lines(daemon, "POST", "/score", {"refs": ["box"], "argv": ["ls", "/bin/sh", "/nowhere"]})[-1]["rows"]
    assert (row["score"], row["error"]) == (0.0, None), "it is nowhere, so the command says so itself"


def test_the_good_end_of_a_bisection_is_an_ancestor(daemon: Daemon) -> None:
    _, other = daemon.client.create(name="other")
    _, first = daemon.client.create(name="box")
    with pytest.raises(UsageError, match=f"name a good one that `snapshotd log {first.id[:12]}` lists"):
        lines(daemon, "POST", "/bisect", {"ref": "box", "good": other.id, "argv": ["true"]})


def test_files_of_a_scorer_are_bounded(daemon: Daemon) -> None:
    """They may be larger than other bodies, and not as large as they like."""
    daemon.client.create(name="box")
    body = {"refs": ["box"], "argv": ["true"]}
    assert lines(daemon, "POST", "/score", {**body, "files_b64": b64(10 << 20)})[-1]["rows"][0]["ref"] == "box"
    with pytest.raises(LimitExceeded, match=str(FILES_MAX_BYTES)):
        lines(daemon, "POST", "/score", {**body, "files_b64": b64(FILES_MAX_BYTES + 1)})
    with pytest.raises(LimitExceeded, match="33554432 are the most"):
        lines(daemon, "POST", "/score", {**body, "files_b64": b64(33 << 20)})
    with pytest.raises(UsageError, match="are not base64"):
        lines(daemon, "POST", "/score", {**body, "files_b64": "?"})
    with pytest.raises(UsageError, match="there are none"):
        lines(daemon, "POST", "/score", {**body, "files_path": "/x"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": "a/b"}, "is malformed"),
        ({"name": "x" * 62}, "is malformed"),
        ({"variants": []}, "variants"),
        ({"variants": [{"label": "a"}, {"label": "a"}]}, "none of them twice"),
        ({"variants": [{"label": "a", "name": "own"}]}, "leave it out"),
        ({"args": None}, "nothing to run"),
        ({"repeat": 10_001}, "repeat"),
        ({"parallel": 257}, "parallel"),
        ({"repeat": 6000, "variants": [{"label": "a"}, {"label": "b"}]}, "12000 branches are more than 10000"),
        ({"budget": {"cost": 1}}, "prices"),
        ({"budget": {"seconds": -1}}, "seconds"),
        ({"score": {"argv": ["true"], "number": True, "junit": "r.xml"}}, "choose one"),
        ({"score": {"argv": ["true"], "files_b64": "eA=="}}, "are no tar"),
        ({"score": {"argv": ["true"], "files_b64": SPARSE}}, "is sparse"),
        ({"score": {"argv": ["true"], "junit": "\ud800"}}, "not Unicode"),
        ({"source": {"name": "own"}}, "leave the name out"),
        ({"secret": 1}, "secret"),
    ],
)
def test_descriptions_that_are_refused(daemon: Daemon, more: dict[str, Any], said: str) -> None:
    _, first = daemon.client.create()
    with pytest.raises(UsageError, match=said):
        ask(daemon, "POST", "/experiments", {**experiment(first.id), **more})
    assert ask(daemon, "GET", "/experiments") == []


def test_an_experiment_is_followed_by_many(daemon: Daemon) -> None:
    _, first = daemon.client.create()
    made = ask(daemon, "POST", "/experiments", experiment(first.id, repeat=3))
    assert (made["name"], len(made["branches"])) == ("way", 3)
    (reader, other) = (lines(daemon, "GET", "/experiments/way/events") for _ in range(2))
    assert reader[-1]["event"] == other[-1]["event"] == "ended"
    whole = {key: value for key, value in reader[-1].items() if key != "event"}
    assert whole == ask(daemon, "GET", "/experiments/way") == ask(daemon, "GET", "/experiments")[0]
    assert ask(daemon, "POST", "/experiments", experiment(first.id, repeat=3)) == whole, "the same description again"
    with pytest.raises(Conflict, match="another description"):
        ask(daemon, "POST", "/experiments", experiment(first.id, repeat=2))
    assert ask(daemon, "POST", "/experiments/way/stop") == whole, "it has ended"
    ask(daemon, "DELETE", "/experiments/way")
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/stop"), ("DELETE", "")):
        with pytest.raises(NotFound, match="no experiment"):
            ask(daemon, method, f"/experiments/way{path}")
    assert json.dumps(whole).count('"scored"') == 3


def test_what_a_scorer_brings_and_leaves_stays_in_a_plain_folder(daemon: Daemon, short_dir: Path) -> None:
    """Such a fork sees all of this machine."""
    daemon.client.create(name="box")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("hidden"))
    mine = short_dir / "mine"
    mine.mkdir()
    (mine / "kept").write_text("mine")
    body = {
        "refs": ["box"],
        "argv": [
            "/bin/sh",
            "-c",
            f'test -f "$SNAPSHOTD_ROOT{mine}/hidden" && printf %s "$1" > "$SNAPSHOTD_JUNIT"',
            "sh",
        ],
        "files_b64": base64.b64encode(archive.getvalue()).decode(),
    }
    body["argv"].append('<testsuite><testcase name="one"/></testsuite>')
    for where in (str(mine), f"/../..{mine}"):
        for report in (f"/{new_id()}.xml", f"/../{new_id()}.xml"):
            row = lines(daemon, "POST", "/score", {**body, "files_path": where, "junit": report})[-1]["rows"][0]
            assert (row["score"], row["error"]) == (1.0, None)
            assert not Path("/", report).exists()
    assert os.listdir(mine) == ["kept"]
    to = short_dir / "report.xml"
    daemon.client.exec_junit("box", ["/bin/sh", "-c", 'echo "<testsuite/>" > "$SNAPSHOTD_JUNIT"'], to)
    assert to.read_text().strip() == "<testsuite/>"
