"""What a rewind costs does not depend on what changed: it looks at no file."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from snapshotd.api.history import RewindRequest
from snapshotd.engine.engine import Engine
from snapshotd.layers.pivot import Target
from tests import long, mind_rig

pytestmark = pytest.mark.runc
MANY = long.size(4_000, 20_000)
ROUNDS = 3


@contextmanager
def _counted() -> Iterator[list[int]]:
    """How many functions this thread enters, Python's and C's: whatever looks at files one by one is at least one for
    each."""
    count = [0]

    def called(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            count[0] += 1

    sys.setprofile(called)
    try:
        yield count
    finally:
        sys.setprofile(None)


def _costs(engine: Engine, script: str) -> tuple[int, int]:
    """Of a rewind over what `script` does, and of its undo; the least of a few rounds, since waiting for something is
    calls, too."""
    agent = mind_rig.agent(engine)
    agent.say("before")
    before = agent.tool("write", {"what": "nothing"})
    agent.say("after")
    agent.tool("write", {"what": "all"}, script)
    seen = agent.sh("ls -A * | wc -l")
    rewinds, undos = [], []
    for _ in range(ROUNDS):
        with _counted() as count:
            engine.branching.rewind(agent.id, RewindRequest(before.id))
        rewinds.append(count[0])
        assert (agent.files(), agent.said()) == ({}, ["before"])
        with _counted() as count:
            engine.branching.undo(agent.id)
        undos.append(count[0])
        assert (agent.sh("ls -A * | wc -l"), agent.said()) == (seen, ["before", "after"])
    return min(rewinds), min(undos)


def test_a_rewind_of_thousands_of_files_does_what_that_of_one_does(engine: Engine) -> None:
    one = _costs(engine, "echo 1 > file")
    many = _costs(engine, f"mkdir d; cd d; i=0; while [ $i -lt {MANY} ]; do echo $i > $i; i=$((i+1)); done")
    for few, as_few in zip(one, many, strict=True):
        assert 0 < as_few < few + MANY // 20, (one, many)


def test_a_rewind_does_not_wait_until_the_old_root_is_gone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letting go of a root evicts whatever was touched there."""
    let_go: list[int] = []

    def seen(target: Target) -> None:
        with contextlib.suppress(IndexError):
            while True:  # several threads may do this at once, and each counts its own
                os.close(target.retired.popleft())
                let_go.append(threading.get_ident())

    agent = mind_rig.agent(engine)
    before = agent.head
    agent.sh("echo 1 > uncaptured")  # so that the rewind takes a snapshot first: two roots are left
    engine.storage.flush()  # other sandboxes' roots are gone by now
    monkeypatch.setattr(Target, "bury", seen)
    engine.branching.rewind(agent.id, RewindRequest(before.id))
    engine.branching.undo(agent.id)
    assert agent.files() == {"uncaptured": "1\n"}
    engine.storage.flush()
    assert len(let_go) == 3
    assert threading.get_ident() not in let_go
    assert not agent.sandbox.root._target.retired
