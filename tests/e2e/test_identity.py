"""What docs/limits.md says two forks have apart or in common, looked at in two forks and their source; and images whose
/etc/machine-id is no file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshotd.client import Snapshotd
from tests import long
from tests.e2e.model_rig import provider
from tests.e2e.support import AGENT, Snap, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
IN_THE_IMAGE = "0123456789abcdef0123456789abcdef"
RUN_ALL = """
import json, subprocess, sys
done = [subprocess.run(["sh", "-c", line], capture_output=True, text=True) for line in json.loads(sys.argv[1])]
print(json.dumps([one.stdout or one.stderr for one in done]))
"""


@pytest.fixture(scope="module")
def snap(own_snap: Snap) -> Snap:
    """One daemon for all tests here, which may be killed: they share an image with an /etc/machine-id."""
    return own_snap


class Row(NamedTuple):
    thing: str
    shared: bool
    command: str


def _rows() -> list[Row]:
    table = (
        PAGE.read_text().partition("| Thing | Two forks have | To see it |\n|---|---|---|\n")[2].partition("\n\n")[0]
    )
    found = [re.fullmatch(r"\| (.+?) \| (own|same) \| `(.+)` \|", line) for line in table.splitlines()]
    assert found
    return [Row(match[1], match[2] == "same", match[3]) for match in found if match] if all(found) else []


def _seen(snap: Snap, sandbox: str, commands: list[str]) -> list[str]:
    done = snap.json("exec", sandbox, "--", "python3", "-c", RUN_ALL, json.dumps(commands))
    assert done["exit_code"] == 0, done
    found: list[str] = json.loads(done["stdout"])
    return found


def _imported(snap: Snap, source: Path, name: str) -> Iterator[str]:
    """An image under this name, while it is needed."""
    snap("image", "import", source, "--name", name)
    yield name
    snap("image", "rm", name)


@pytest.fixture(scope="module")
def with_id(snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The default image with an /etc/machine-id."""
    file = tmp_path_factory.mktemp("image") / "root.tar"
    maker, _ = snap.create("--runtime", "runc")
    made = snap.sh(maker, f"echo {IN_THE_IMAGE} > /etc/machine-id")["snapshot"]
    snap("export", "--format", "tar", made, "-o", file)
    snap("rm", "--force", maker)
    yield from _imported(snap, file, "with-machine-id")


def test_the_page_says_what_two_forks_share(snap: Snap, runtime: str, with_id: str, tmp_path: Path) -> None:
    rows = _rows()
    assert len(rows) > 15, "every line of the table is of the fixed form"
    assert {row.shared for row in rows} == {True, False}
    with provider(tmp_path) as at:
        options = ("--image", with_id, "--runtime", runtime, "--provider", f"openai={at.url}", "-e", "MODE=fast")
        source, _ = snap.create(*options, "--secret", "TOKEN=value-of-a-secret-in-a-test")
        put = "python3 -c 'from snapshotd.agent import store; store.put(\"shared\", [1])'"
        base = snap.sh(source, f"cat /etc/machine-id > id; {put}")["snapshot"]
        forks = snap.json("fork", base, "--n", "2")["trajectories"]
        for fork in forks:
            assert snap.json("diff", base, fork) == []
        commands = [row.command for row in rows]
        left, right, before = (_seen(snap, each, commands) for each in (*forks, source))
        for row, *values in zip(rows, left, right, before, strict=True):
            assert values[0].strip(), f"nothing is seen of the {row.thing}"
            assert not re.search("Traceback|not found|No such", values[0]), (row.thing, values[0])
            assert len(set(values)) == (1 if row.shared else 3), (row.thing, values)
        by_thing = {row.thing.partition(",")[0]: value.strip() for row, value in zip(rows, left, strict=True)}
        assert re.fullmatch("[0-9a-f]{32}", by_thing["machine id"])
        assert by_thing["machine id"] != IN_THE_IMAGE
        assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", by_thing["boot id"])
        assert by_thing["hostname"] == f"sandbox-{forks[0][:12]}"
        steady = [
            row.command for row in rows if row.thing.startswith(("trajectory id", "hostname", "machine id", "boot"))
        ]
        first = _seen(snap, forks[0], steady)
        step = snap.sh(forks[0], "echo x > x")["snapshot"]
        assert _seen(snap, forks[0], steady) == first, "after a pivot"
        snap("rewind", forks[0], base)
        assert _seen(snap, forks[0], steady) == first, "after a rewind"
        snap("stop", forks[0])
        assert _seen(snap, forks[0], steady) == first, "in another container"
        assert snap("cat", f"{step}:/etc/machine-id").stdout == f"{IN_THE_IMAGE}\n"
        assert [change["path"] for change in snap.json("diff", base, step)] == ["/workspace/x"]
        refused = snap.sh(forks[1], "echo z > /etc/machine-id || rm /etc/machine-id || echo refused")["stdout"]
        assert refused == "refused\n"
        for each in (*forks, source):
            snap("rm", "--force", each)


@pytest.mark.long  # images with one: the test before
def test_an_image_without_such_a_file_gets_none(snap: Snap, runtime: str) -> None:
    source, base = snap.create("--runtime", runtime)
    assert snap.sh(source, "test ! -e /etc/machine-id && echo none")["stdout"] == "none\n"
    (fork,) = snap.json("fork", base)["trajectories"]
    assert snap.json("diff", base, fork) == []
    snap("cat", f"{fork}:/etc/machine-id", code=4)
    step = snap.sh(fork, "echo mine > /etc/machine-id")["snapshot"]
    assert snap.sh(fork, "cat /etc/machine-id")["stdout"] == "mine\n"
    (again,) = snap.json("fork", step)["trajectories"]
    assert snap.sh(again, "cat /etc/machine-id")["stdout"] == "mine\n", "what a program wrote is a file"
    for each in (again, fork, source):
        snap("rm", "--force", each)


@pytest.fixture(scope="module")
def small_image(snap: Snap, small_root: Path) -> Iterator[str]:
    yield from _imported(snap, small_root, "small-for-identity")


@pytest.mark.runc
@pytest.mark.parametrize("made", long.some(["ln -s /workspace/target /etc/machine-id", "mknod /etc/machine-id p"], 1))
def test_a_hostile_image_is_left_as_it_is(snap: Snap, small_image: str, tmp_path: Path, made: str) -> None:
    maker, _ = snap.create("--runtime", "runc", "--image", small_image)
    root = snap.sh(maker, f"rm -f /etc/machine-id; {made}")["snapshot"]
    snap("export", "--format", "tar", root, "-o", tmp_path / "root.tar")
    name = f"hostile-{tmp_path.name}"[:60]
    snap("image", "import", tmp_path / "root.tar", "--name", name)
    source, base = snap.create("--runtime", "runc", "--image", name)
    seen = snap.sh(source, "cat /proc/self/mounts | grep -c machine-id; ls -ld /etc/machine-id; ls -A /workspace")[
        "stdout"
    ]
    assert seen.startswith("0\n")
    assert "target\n" not in seen.splitlines()
    (fork,) = snap.json("fork", base)["trajectories"]
    snap.sh(fork, "true")
    assert snap.json("diff", base, fork) == []
    for each in (fork, source, maker):
        snap("rm", "--force", each)
    snap("image", "rm", name)


@pytest.mark.long  # a hostile image: the test before
@pytest.mark.runc
def test_a_sandbox_that_moves_its_etc_away_goes_on(snap: Snap, with_id: str) -> None:
    """The mount goes with the directory; the next root has it where the file is, or nowhere."""
    source, base = snap.create("--runtime", "runc", "--image", with_id)
    own = snap.sh(source, "cat /etc/machine-id")["stdout"]
    moved = snap.sh(source, "mv /etc /e; ln -s e /etc; echo 1 > one")["snapshot"]
    assert snap.sh(source, "cat /etc/machine-id; echo 2 > two")["stdout"].strip()
    (fork,) = snap.json("fork", moved)["trajectories"]
    assert snap.sh(fork, "cat one /etc/machine-id")["stdout"] == f"1\n{IN_THE_IMAGE}\n"
    snap.sh(source, "rm /etc; mv /e /etc; echo 3 > three")
    assert snap.sh(source, "cat /etc/machine-id")["stdout"] == own
    assert snap("cat", f"{source}:/workspace/three").stdout == "3\n"
    assert [change["path"] for change in snap.json("diff", base, source) if "etc" in change["path"]] == []
    for each in (fork, source):
        snap("rm", "--force", each)


@pytest.mark.long  # in another container: the first test
@pytest.mark.runc
def test_a_sandbox_that_outlives_its_daemon_keeps_its_identity(snap: Snap, with_id: str, tmp_path: Path) -> None:
    client = Snapshotd(state_dir=snap.state_dir)
    program = """
import time
for number in range(3):
    shell("cat /etc/machine-id /proc/sys/kernel/random/boot_id /proc/sys/kernel/hostname >> seen")
    while not os.path.exists(f"go{number}"):
        time.sleep(0.05)
"""
    (tmp_path / "agent.py").write_text(AGENT + program)
    options = ("--image", with_id, "--runtime", "runc", "--name", "lasting")
    snap("run", "--detach", *options, tmp_path / "agent.py")

    def calls() -> int:
        return [step.tool.name for step in client.log("lasting")].count("shell")

    wait_until(lambda: calls() == 1, "it took its first step")
    snap.kill_daemon()
    for number in range(3):
        client.exec("lasting", ["touch", f"go{number}"])
        wait_until(lambda number=number: calls() == min(number + 2, 3), "it took its next step")  # type: ignore[misc]
    snap("attach", "lasting")
    seen = snap("cat", "lasting:seen").stdout.splitlines()
    assert len(seen) == 9
    assert len(set(seen)) == 3, "three times the same"
    assert IN_THE_IMAGE not in seen
    snap("rm", "--force", "lasting")
