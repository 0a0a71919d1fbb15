"""The table of errors in the text of `errors.py` is the table that the classes hold."""

from __future__ import annotations

import copy
import pickle
import re

from snapshotd import errors
from snapshotd.cli import command
from snapshotd.client import following
from snapshotd.client.outcomes import ExecFailed, ExecResult
from snapshotd.errors import BY_CODE, NotFound, SnapshotdError

ROW = re.compile(r"^ +([A-Z]\w+) +(\d+) +(\d+) +\S", re.MULTILINE)


def all_errors() -> set[type[SnapshotdError]]:
    found, todo = set(), [SnapshotdError]
    while todo:
        for cls in todo.pop().__subclasses__():
            if cls.__module__ == errors.__name__:
                found.add(cls)
                todo.append(cls)
    return found


def test_the_documented_numbers_are_the_real_ones() -> None:
    documented = {name: (int(code), int(status)) for name, code, status in ROW.findall(errors.__doc__ or "")}
    assert documented == {cls.__name__: (cls.exit_code, cls.http_status) for cls in all_errors()}


def test_every_error_crosses_the_wire() -> None:
    assert set(BY_CODE.values()) == all_errors()
    for code, cls in BY_CODE.items():
        error = cls("what, on which thing, why: next step")
        assert error.code == code
        assert error.message == str(error) == "what, on which thing, why: next step"


def test_exit_codes_tell_errors_apart() -> None:
    codes = [cls.exit_code for cls in all_errors()]
    assert len(set(codes)) == len(codes)
    assert all(2 <= code <= 127 for code in codes)  # 0 and 1 are taken, from 128 on a signal is meant
    assert all(400 <= cls.http_status < 600 for cls in all_errors())


def test_an_error_is_caught_by_its_base() -> None:
    error = NotFound("there is no x")
    assert isinstance(error, SnapshotdError)
    assert error.exit_code == 4


def test_every_error_comes_whole_from_another_process() -> None:
    failed = ExecFailed("it failed", ExecResult(3, b"out", b"err", "5" * 64))
    others = [cls("it failed") for cls in (*all_errors(), command.Declined, following.StillRunning, SnapshotdError)]
    for error in (failed, *others):
        error.add_note("a note")
        for made in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(made) is type(error)
            assert made.message == str(made) == "it failed"
            assert vars(made) == vars(error)
