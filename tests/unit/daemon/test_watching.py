"""Followers of all events: none costs a thread, none holds up another, each is told of a step within moments."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import selectors
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.daemon.http import watching
from snapshotd.daemon.http.watching import KEPT_MAX, Watchers
from snapshotd.engine.watch import Watch
from snapshotd.errors import LimitExceeded
from tests.unit.daemon.asking import lines
from tests.unit.daemon.process import Daemon

FOLLOWERS = 500


def engine(watch: Watch) -> Any:
    return SimpleNamespace(life=SimpleNamespace(listen=watch.listen))


async def read(follower: AsyncIterator[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await anext(follower)).splitlines()]


def test_a_slow_follower_loses_the_oldest_and_is_told() -> None:
    async def follow() -> None:
        watch, watchers = Watch(), Watchers()
        slow, quick = await watchers.watch(engine(watch)), await watchers.watch(engine(watch))
        assert await read(slow) == await read(quick) == [{"event": "watching"}]
        heard = []
        for number in range(KEPT_MAX + 5):
            watch.publish({"event": "approval", "number": number})
            heard += [event["number"] for event in await read(quick)]
        assert heard == list(range(KEPT_MAX + 5))
        lost, *rest = await read(slow)
        assert lost == {"event": "lost", "count": 5}
        assert [event["number"] for event in rest] == list(range(5, KEPT_MAX + 5))
        watchers.close()
        assert [event async for event in slow] == []

    asyncio.run(follow())


def test_large_events_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "KEPT_BYTES", 1000)

    async def follow() -> None:
        watch, watchers = Watch(), Watchers()
        follower = await watchers.watch(engine(watch))
        await read(follower)
        for size in (300, 300, 300, 5000):
            watch.publish({"event": "approval", "text": "x" * size})
        assert [len(event.get("text", "")) for event in await read(follower)] == [0, 5000], "the newest is kept"
        watchers.close()

    asyncio.run(follow())


def test_a_follower_is_told_that_the_daemon_lives_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ALIVE_S", 0.01)
    monkeypatch.setattr(watching, "WATCHERS_MAX", 1)

    async def follow() -> None:
        watch, watchers = Watch(), Watchers()
        follower = await watchers.watch(engine(watch))
        with pytest.raises(LimitExceeded):
            await watchers.watch(engine(watch))
        assert [await read(follower), await read(follower)] == [[{"event": "watching"}], [{"event": "alive"}]]
        await asyncio.to_thread(watchers.close)
        assert [event async for event in follower if b"alive" not in event] == []
        assert watchers.count() == 0

    asyncio.run(follow())


@contextmanager
def followers(daemon: Daemon, number: int) -> Iterator[list[socket.socket]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * number)), hard))
    opened = []
    try:
        for _ in range(number):
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].connect(str(daemon.socket_path))
            opened[-1].sendall(b"GET /v1/watch HTTP/1.1\r\nHost: d\r\n\r\n")
        yield opened
    finally:
        for one in opened:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_for(sockets: list[socket.socket], word: bytes) -> float:
    """Read until each has said the word; how long that took."""
    began, said = time.monotonic(), dict.fromkeys(sockets, b"")
    with selectors.DefaultSelector() as waiting:
        for one in sockets:
            waiting.register(one, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(60)
            assert ready, f"{len(waiting.get_map())} never said it"
            for key, _ in ready:
                one: Any = key.fileobj
                said[one] += one.recv(1 << 16)
                if word in said[one]:
                    waiting.unregister(one)
    return time.monotonic() - began


def threads_of(pid: int) -> int:
    return len(os.listdir(Path("/proc", str(pid), "task")))


def test_five_hundred_followers_cost_no_thread_and_hear_of_a_step(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    lines(daemon, "POST", "/trajectories/box/exec", {"argv": ["/bin/true"]})
    pid = daemon.client.version().pid
    before = threads_of(pid)
    with followers(daemon, FOLLOWERS) as opened:
        wait_for(opened, b'"watching"')
        assert threads_of(pid) <= before + 2, "a worker or two for the requests of this test"
        *_, done = lines(daemon, "POST", "/trajectories/box/exec", {"argv": ["/bin/true"]})
        took_s = wait_for(opened, done["snapshot"]["id"].encode())
        assert took_s < 5, "after the commit"
        assert daemon.client.stats().watchers == FOLLOWERS
    deadline = time.monotonic() + 60
    while daemon.client.stats().watchers:
        assert time.monotonic() < deadline, "followers that are gone stay"
        time.sleep(0.05)


def test_a_step_is_heard_of_within_moments(daemon: Daemon) -> None:
    client = daemon.client
    client.create(name="box")
    with followers(daemon, 1) as (follower,):
        wait_for([follower], b'"watching"')
        times = []
        for _ in range(10):
            done = client.exec("box", ["/bin/true"])
            times.append(wait_for([follower], done.snapshot.id.encode()))
    assert sorted(times)[5] < 0.1, "the median, after the command's own answer"
