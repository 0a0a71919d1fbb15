"""Work on many things at once."""

from __future__ import annotations

from snapshotd.at_once import at_once
from snapshotd.catalog.base import as_tenant, present_tenant


def test_the_threads_see_what_their_caller_sees() -> None:
    with as_tenant("acme"):
        assert [seen for _, seen in at_once(range(4), 2, lambda _: present_tenant())] == ["acme"] * 4
