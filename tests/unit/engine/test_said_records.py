"""Every value of the engine has what its record in the API says of it, by the same name or by the one that is declared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from snapshotd.engine import records

SAID = [(kind, form) for kind, form in records.record_of.registry.items() if isinstance(form, partial)]


@pytest.mark.parametrize(("kind", "form"), SAID, ids=lambda one: getattr(one, "__name__", ""))
def test_a_value_has_all_that_its_record_says(kind: type[Any], form: partial[Any]) -> None:
    record = form.args[0]
    paths = [_path(get) for _, get, _ in records._getters(record)]
    assert [path for path in paths if not hasattr(kind, path) and path not in kind.__dataclass_fields__] == []


def _path(get: Any) -> str:
    """The first attribute that an `attrgetter` reads."""
    return str(get.__reduce__()[1][0]).partition(".")[0]
