"""What every catalog must do. Each function of `CHECKS` takes an empty catalog of its own; they stand in the modules
beside this one."""

from __future__ import annotations

from collections.abc import Callable

from snapshotd.catalog.base import Catalog
from tests.contracts import (
    catalog_approvals,
    catalog_conversations,
    catalog_experiments,
    catalog_figures,
    catalog_journals,
    catalog_references,
    catalog_requests,
    catalog_snapshots,
    catalog_tenants,
    catalog_trajectories,
    catalog_values,
)

CHECKS: tuple[Callable[[Catalog], None], ...] = (
    *catalog_trajectories.CHECKS,
    *catalog_snapshots.CHECKS,
    *catalog_conversations.CHECKS,
    *catalog_journals.CHECKS,
    *catalog_references.CHECKS,
    *catalog_tenants.CHECKS,
    *catalog_requests.CHECKS,
    *catalog_approvals.CHECKS,
    *catalog_values.CHECKS,
    *catalog_experiments.CHECKS,
    *catalog_figures.CHECKS,
)
