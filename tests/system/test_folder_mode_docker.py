"""Sandboxes without isolation in a container that was given nothing: `docker run` without an option that allows
anything, as root there and as another user."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dockerd import Engine
from tests.e2e import deployment

pytestmark = [
    pytest.mark.long,
    pytest.mark.docker,
    pytest.mark.timeout(1200),
]  # the first time, the base image is bootstrapped
AGENT = """
import os, subprocess
from snapshotd.agent import message, tool

@tool
def shell(script):
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout

message("user", "go on")
shell("echo one > a; mkdir d; echo x > d/f; ln d/f d/g")
shell("echo two >> a; rm d/f; mv d e; touch /elsewhere || true")
print(open("a").read().split(), os.listdir("e"))
"""
TOUR = r"""
set -e
cd "$HOME"
printf '%s' "$AGENT" > agent.py
snapshotd run -- true > refused 2>&1 || grep -q -- '--isolation none' refused
snapshotd run --isolation none --quiet --name tour agent.py
first=$(snapshotd log --json tour | python3 -c 'import json, sys; print(json.load(sys.stdin)[1]["id"])')
snapshotd diff $first tour
snapshotd rewind --yes tour $first > /dev/null
snapshotd exec tour -- sh -c 'cat a; ls -R d; stat -c %h d/f' 2> /dev/null
snapshotd fork $first --name other > /dev/null
snapshotd exec other -- sh -c 'echo forked >> a' 2> /dev/null
snapshotd cat other:a
snapshotd restore $first --to out 2> /dev/null > /dev/null
cat out/workspace/d/g
snapshotd stop tour other > /dev/null
snapshotd check > /dev/null 2>&1
snapshotd prune --force > /dev/null 2>&1
snapshotd cat $first:d/f
snapshotd daemon --stop 2> /dev/null
ps -eo args --no-headers | grep -v -e 'ps -eo' -e '^sh' -e '^grep' -e docker-init || true
"""
SAID = """['one', 'two'] ['g']
M /workspace/a
D /workspace/d/
D /workspace/d/f
D /workspace/d/g
A /workspace/e/
A /workspace/e/g
one
d:
f
g
2
one
forked
x
x
"""


@pytest.fixture(scope="module")
def image(docker_daemon: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with Debian's Python and the wheels of this checkout."""
    name, directory = "snapshotd-plain:test", tmp_path_factory.mktemp("plain")
    deployment.import_base()
    deployment.stage(directory)
    (directory / "Dockerfile").write_text(
        f"FROM {deployment.BASE_IMAGE}\nCOPY wheelhouse /wheelhouse\n"
        "RUN python3 -m venv /opt/s && /opt/s/bin/pip install -q --no-index --find-links /wheelhouse snapshotd"
        " && mkdir -m 777 /home/any\nENV PATH=/opt/s/bin:/usr/bin:/bin HOME=/home/any\n"
    )
    (directory / ".dockerignore").unlink(missing_ok=True)
    _docker("build", "-q", "-t", name, str(directory))
    yield name
    _docker("image", "rm", "-f", name)


@pytest.mark.parametrize("user", ["0", "1234"])
def test_the_tour_in_a_plain_container(image: str, user: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "docker",
            "run",
            "--rm",
            "--init",
            "--user",
            user,
            "--network",
            "none",
            "-e",
            f"AGENT={AGENT}",
            image,
            "sh",
            "-c",
            TOUR,
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == SAID, done.stderr


def _docker(*arguments: str) -> None:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
