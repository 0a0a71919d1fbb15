"""Following a run at a server that goes away in the middle: every event comes once, in order, and nothing goes on for
ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Sandbox, following
from snapshotd.client.client import Snapshotd
from snapshotd.client.following import Following
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import iterate, run
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, Unsupported, UsageError
from tests.unit.client.events_server import TRAJECTORY, Answer, EventsServer, serving
from tests.unit.daemon.process import Daemon

PATH = f"/trajectories/{TRAJECTORY}/events"
FINISHED = {"event": "finished", "trajectory": TRAJECTORY, "exit_code": 0, "snapshots": 2, "status": "finished"}
EVENTS: list[dict[str, Any]] = [
    {"event": "started", "trajectory": TRAJECTORY},
    {"event": "output", "stream": "stdout", "data_b64": "YQ=="},
    {"event": "output", "stream": "stdout", "data_b64": "YQ=="},
    {"event": "snapshot", "seq": 1},
    FINISHED,
]  # two of them are equal: it is their number that counts


@pytest.fixture
def server(short_dir: Path) -> Iterator[EventsServer]:
    with serving(EventsServer(short_dir / "s.sock", list(EVENTS))) as running:
        yield running


@pytest.fixture
def client(server: EventsServer, reconnect_s: None) -> Snapshotd:
    return Snapshotd(socket=server.path, autostart=False)


@pytest.fixture(autouse=True)
def reconnect_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests takes so long unless it fails."""
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "60")


@pytest.mark.parametrize("seen", range(len(EVENTS)))
@pytest.mark.parametrize("more", [b"", b'{"event":"outp'], ids=["between lines", "in a line"])
def test_each_event_comes_once_wherever_the_answer_breaks(
    server: EventsServer, client: Snapshotd, seen: int, more: bytes
) -> None:
    server.answers = [Answer(seen, more)]
    lost: list[str] = []
    assert list(client.events("box", on_lost=lambda: lost.append("lost"))) == EVENTS
    assert (lost, server.asked) == (["lost"], 2)


def test_daemons_that_die_one_after_another(server: EventsServer, client: Snapshotd) -> None:
    """As long as it gets on, each loss is told; three daemons that brought nothing are one loss."""
    server.answers = [Answer(1), Answer(2), Answer(2, b"{"), Answer(0), Answer(1), Answer(4), Answer(4)]
    lost: list[int] = []
    assert list(client.events("box", on_lost=lambda: lost.append(server.asked))) == EVENTS
    assert (lost, server.asked) == ([1, 2, 6], 8)


def test_a_daemon_that_comes_back_later(server: EventsServer, client: Snapshotd) -> None:
    """Nobody listens for a while, and this client starts no daemon."""
    server.answers = [Answer(2)]
    beginners: list[threading.Thread] = []

    def gone() -> None:
        server.stop()
        beginners.append(threading.Thread(target=server.start))
        beginners[0].start()

    assert list(client.events("box", on_lost=gone)) == EVENTS
    beginners[0].join()
    assert server.asked == 2


def test_the_log_goes_on_while_it_is_followed(server: EventsServer, client: Snapshotd) -> None:
    server.events = EVENTS[:2]
    server.answers = [Answer(2)]
    followed = client.events("box")
    assert [next(followed), next(followed)] == EVENTS[:2]
    server.append(*EVENTS[2:])
    assert list(followed) == EVENTS[2:]


def test_a_daemon_is_started_where_none_runs(short_dir: Path) -> None:
    server = EventsServer(short_dir / "s.sock", list(EVENTS), answers=[Answer(2)])
    started: list[int] = []

    def start() -> None:
        started.append(server.asked)
        server.start()

    try:
        events = _events(Transport(server.path, start), on_lost=server.stop)
        assert list(events) == EVENTS
        assert (started, server.asked) == ([0, 1], 2)
    finally:
        server.stop()


def test_what_keeps_a_daemon_from_starting_is_raised_at_once(server: EventsServer) -> None:
    server.answers = [Answer(2)]
    tries: list[int] = []

    def start() -> None:
        tries.append(1)
        raise Unsupported("no runtime")

    followed = _events(Transport(server.path, start), on_lost=server.stop)
    assert [next(followed), next(followed)] == EVENTS[:2]
    with pytest.raises(Unsupported, match="no runtime"):
        next(followed)
    assert tries == [1]


def test_it_gives_up_without_a_busy_loop(server: EventsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow from 20 ms: in 0.3 s there is room for five of them."""
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "0.3")
    client = Snapshotd(socket=server.path, autostart=False)
    server.answers = [Answer(2) for _ in range(100)]
    lost: list[str] = []
    followed = client.events("box", on_lost=lambda: lost.append("lost"))
    assert [next(followed), next(followed)] == EVENTS[:2]
    with pytest.raises(DaemonUnavailable, match="went away") as raised:
        next(followed)
    assert raised.value.code == "DaemonUnavailable"
    assert lost == ["lost"]
    assert 2 <= server.asked <= 7


def test_a_connection_that_held_has_got_somewhere(
    server: EventsServer, client: Snapshotd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that says nothing for hours may see many daemons. Here every connection has held for long enough."""
    monkeypatch.setattr(following, "_HELD_S", -1.0)
    server.answers = [Answer(2) for _ in range(8)]
    lost: list[str] = []
    assert list(client.events("box", on_lost=lambda: lost.append("lost"))) == EVENTS
    assert len(lost) == 8


def test_zero_seconds_means_at_once(server: EventsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "0")
    client = Snapshotd(socket=server.path, autostart=False)
    server.answers = [Answer(2)]
    lost: list[str] = []
    followed = client.events("box", on_lost=lambda: lost.append("lost"))
    assert [next(followed), next(followed)] == EVENTS[:2]
    with pytest.raises(DaemonUnavailable, match=r"went away.*safe.*snapshotd log"):
        next(followed)
    assert (lost, server.asked) == ([], 1)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_time_that_makes_no_sense(server: EventsServer, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", text)
    with pytest.raises(UsageError, match=f"SNAPSHOTD_RECONNECT_S.*{text}"):
        Snapshotd(socket=server.path, autostart=False)
    assert server.requests == []


def test_an_answer_without_an_end_counts_only_while_the_trajectory_runs(
    server: EventsServer, client: Snapshotd
) -> None:
    server.answers = [Answer(2, whole=True)]
    assert list(client.events("box")) == EVENTS, "it runs: there is more"
    server.answers = [Answer(2, whole=True)]
    server.status = "interrupted"
    assert list(client.events("box")) == EVENTS[:2]


def test_no_events_at_all(server: EventsServer, client: Snapshotd) -> None:
    """A sandbox runs without an agent."""
    server.answers = [Answer(0, whole=True)]
    assert list(client.events("box")) == []
    assert server.asked == 1


@pytest.mark.parametrize(
    "other",
    [[{"event": "started", "snapshot": "c" * 32}, *EVENTS[1:]], [EVENTS[0], EVENTS[3], FINISHED], [FINISHED]],
    ids=["as long", "shorter", "only its end"],
)
def test_another_run_is_not_taken_for_this_one(
    server: EventsServer, client: Snapshotd, other: list[dict[str, Any]]
) -> None:
    """The trajectory was resumed by somebody else in the meantime: its log begins anew."""
    server.answers = [Answer(4)]

    def resumed() -> None:
        server.events = other

    followed = client.events("box", on_lost=resumed)
    assert [next(followed) for _ in range(4)] == EVENTS[:4]
    with pytest.raises(Conflict, match=r"another run of box.*snapshotd attach"):
        next(followed)


def test_what_the_daemon_itself_says_is_raised(server: EventsServer, client: Snapshotd) -> None:
    server.events[1] = {"event": "error", "error": {"code": "NotFound", "message": "it was removed"}}
    server.answers = [Answer(1)]
    followed = client.events("box")
    assert next(followed) == EVENTS[0]
    with pytest.raises(NotFound, match="it was removed"):
        next(followed)
    assert server.asked == 2


def test_only_a_follower_asks_again(server: EventsServer, client: Snapshotd) -> None:
    server.answers = [Answer(2)]
    with pytest.raises(DaemonUnavailable):
        list(client.events("box", follow=False))
    with pytest.raises(DaemonUnavailable):
        client.exec("box", ["ls"])
    with pytest.raises(DaemonUnavailable):
        client.stop("box")
    asked = [line.split("?")[0].rpartition("/")[2] for line in server.requests]
    assert asked == ["events", "attended", "exec", "exec", "exec", "stop"], "what became of the command, and no more"


def test_watching_begins_with_the_call(daemon: Daemon) -> None:
    client = daemon.client
    box = Sandbox.create(client=client)
    events = client.watch()
    client.ask(box.id, "call-1", "deploy", {"n": 1}, question="really?")
    event = next(one for one in events if one["event"] == "approval")
    assert (event["event"], event["name"], event["trajectory"]) == ("approval", "deploy", box.id)
    client.deny(event["id"])
    assert next(one for one in events if one["event"] == "approval")["status"] == "denied"
    ending = threading.Thread(target=daemon.kill)
    ending.start()
    with pytest.raises(DaemonUnavailable):
        next(events)
    ending.join(60)


def _events(transport: Transport, *, on_lost: Any) -> Iterator[dict[str, Any]]:
    following = Following(transport, PATH.removesuffix("/events"), what="box", patience_s=60, on_lost=on_lost)
    return iterate(run(following.events()))
