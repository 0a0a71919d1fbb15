"""The arithmetic of scores, and the number in a command's output."""

from __future__ import annotations

import math
import threading

import pytest

from snapshotd.at_once import at_once
from snapshotd.engine.experiments.base import SnapshotScores
from snapshotd.engine.experiments.scoring import _Tail, last_number
from snapshotd.errors import UsageError
from snapshotd.scores import ScoredRun, ranked


def row(ref: str, *scores: float | None) -> SnapshotScores:
    runs = [ScoredRun(one, int(one != 1), 0.0, error=None if one is not None else "none") for one in scores]
    return SnapshotScores(ref, None, tuple(runs))


def test_mean_error_and_pass_at_k() -> None:
    one = row("x", 1.0, 0.0, 0.0, 1.0)
    assert one.mean == 0.5
    assert one.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert (one.passed, one.pass_at(1), one.pass_at(4)) == (2, 0.5, 1.0)
    assert one.pass_at(2) == pytest.approx(1 - 1 / 6)
    with pytest.raises(UsageError):
        one.pass_at(5)
    assert (row("x", 1.0).standard_error, row("x", None).mean, row("x", None, 3.0).mean) == (None, None, 3.0)
    assert row("x", None, 1.0).error == "none"


def test_numbers_that_are_almost_too_large_have_a_mean() -> None:
    one = row("x", 1.7e308, 1.7e308, 1.6e308)
    assert one.mean == pytest.approx(1.6666e308, rel=1e-3)
    assert one.standard_error == math.inf


def test_equal_means_share_a_rank_and_no_score_has_none() -> None:
    found = ranked([row("a", None), row("b", 0.5), row("c", 0.7), row("d", 0.5), row("e", 0.1)])
    assert [(one.ref, one.rank) for one in found] == [("c", 1), ("b", 2), ("d", 2), ("e", 4), ("a", None)]


@pytest.mark.parametrize(
    ("output", "number"),
    [
        (b"1\n2\n", 2.0),
        (b"1.5 \r\ndone 7\n\n", 1.5),
        (b"-.5e1", -5.0),
        (b"3\n1e999\nnan\ninf\n1_0\n\xd9\xa1\n0x10", 3.0),
    ],
)
def test_the_last_number(output: bytes, number: float) -> None:
    assert last_number(output.splitlines(), 0) == number


def test_no_number() -> None:
    with pytest.raises(UsageError, match=r"no line .* is a number \(exit code 3\); its last line is 'nan'"):
        last_number([b"nan"], 3)


def test_a_long_line_is_no_number() -> None:
    """It costs the square of its length to find that out, and a sandbox wrote it."""
    assert last_number([b"2", b"0." + b"1" * 399], 0) == 2
    with pytest.raises(UsageError, match="no line"):
        last_number([b"1" * 60_000 + b"x"], 0)


def test_a_long_output_keeps_whole_lines_of_its_end() -> None:
    tail = _Tail(10)
    for _ in range(100):
        tail.add(b"1234567\n")
    assert set(tail.lines) == {b"1234567"}
    assert len(tail.data) <= 20


def test_so_many_run_at_once_and_an_error_ends_it() -> None:
    barrier = threading.Barrier(3)
    assert {item for item, _ in at_once([1, 2, 3], 3, lambda _: barrier.wait(30))} == {1, 2, 3}
    seen: list[int] = []

    def work(item: int) -> None:
        seen.append(item)
        raise KeyError(item)

    with pytest.raises(KeyError):
        list(at_once(range(1000), 1, work))
    assert seen == [0]
