"""Users' shares of the hooks' socket: one that takes all it can get leaves room for the others."""

from __future__ import annotations

import threading

import pytest

from snapshotd.daemon import hook_places
from snapshotd.daemon.hook_places import (
    AT_ONCE_OF_ONE,
    KEPT,
    MOST,
    MOST_OF_ONE,
    MOST_OF_ONE_THERE,
    HookPlaces,
    HookTurns,
)
from snapshotd.errors import LimitExceeded
from tests.e2e.support import wait_until


def test_users_who_take_all_places_leave_some_for_others() -> None:
    places = HookPlaces()
    taken = [(uid, sum(places.take(uid) for _ in range(MOST))) for uid in range(1, 20)]
    assert taken[:3] == [(uid, MOST_OF_ONE) for uid in (1, 2, 3)]
    assert MOST - KEPT == 3 * MOST_OF_ONE
    assert {count for _, count in taken[3:]} == {MOST_OF_ONE_THERE}
    assert sum(places.take(0) for _ in range(MOST)) == MOST_OF_ONE
    assert not any(places.take(uid) for uid in range(1, 4))
    for _ in range(MOST_OF_ONE_THERE):
        places.give_back(19)
    assert sum(places.take(99) for _ in range(MOST)) == MOST_OF_ONE_THERE


def test_a_user_whose_requests_never_end_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, end = HookTurns(), threading.Event()
    monkeypatch.setattr(hook_places, "_WAIT_S", 0.05)
    monkeypatch.setattr(hook_places, "_WAIT_FOR_OTHERS_S", 0.01)
    held: list[int] = []

    def stuck(uid: int) -> None:
        with turns.turn(uid):
            held.append(uid)
            end.wait()

    threads = [threading.Thread(target=stuck, args=(uid,)) for uid in range(1, 6) for _ in range(AT_ONCE_OF_ONE)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(held) == len(threads), "all are at work")
    with pytest.raises(LimitExceeded, match="of this user"), turns.turn(1):
        pass
    with turns.turn(6), turns.turn(0):
        held.clear()
    end.set()
    for thread in threads:
        thread.join()
    turns.close()
    with pytest.raises(LimitExceeded, match="stops"), turns.turn(1):
        pass
