"""The order in which a prune reads what must stay."""

from __future__ import annotations

from snapshotd.api.storage import PruneRequest
from snapshotd.catalog.base import Catalog
from snapshotd.engine.engine import Engine
from snapshotd.engine.storage.upkeep import PruneScope
from snapshotd.repo.base import Peers, Roots


class Watched(PruneScope):
    """Notes what it is asked for."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self.asked: list[str] = []

    def more_roots(self) -> Roots:
        self.asked.append("references")
        return super().more_roots()

    def peers(self) -> Peers | None:
        self.asked.append("segments")
        return super().peers()


def test_segments_are_asked_for_after_the_references_that_need_them(engine: Engine) -> None:
    """Else what another node publishes in between would be needed, and be in no segment that this one knows of."""
    upkeep = engine.storage._upkeep
    scope = Watched(engine.storage._catalog)
    upkeep.share(scope)
    upkeep.prune(PruneRequest(grace_s=0), lambda *_: None)
    assert scope.asked == ["references", "segments"]
