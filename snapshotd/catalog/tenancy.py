"""The tenant whose things alone a caller sees.

A caller of one tenant resolves refs as if there were nothing else in the catalog. Only looking by a ref, or by the name of
an approval or experiment, is narrowed: by exact id, and in lists, the engine sees everything, since its own work (a prune,
a name that is taken) is about all tenants. A user's folder and a sandbox without isolation belong to no tenant: they are
of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from snapshotd.catalog.database import CatalogDatabase, Value
from snapshotd.errors import NotFound
from snapshotd.terms import DEFAULT_TENANT, NO_ISOLATION, TENANT_VARIABLE
from snapshotd.types import FOLDER

_present: ContextVar[str | None] = ContextVar("tenant", default=None)
_OWNED = (
    "coalesce((SELECT e.value ->> 1 FROM json_each(t.env) e"
    f" WHERE e.value ->> 0 = '{TENANT_VARIABLE}' LIMIT 1), '{DEFAULT_TENANT}') = ?"
    f" AND t.runtime NOT IN ('{FOLDER}', '{NO_ISOLATION}')"
)
"""True for a row t of `trajectories` that is this tenant's."""


def present_tenant() -> str | None:
    """The tenant of the caller whose work this thread or task does; None: it sees all."""
    return _present.get()


def own_tenant(tenant: str) -> str:
    """The tenant that a request means. A caller of one tenant means its own where it names none. NotFound: another one."""
    present = present_tenant()
    if present is None or tenant == present:
        return tenant
    if tenant != DEFAULT_TENANT:
        raise NotFound(f"there is no tenant {tenant[:80]!r}; leave it out for your own")
    return present


@contextmanager
def as_tenant(tenant: str | None) -> Iterator[None]:
    """Do the block's work for a caller of this tenant: in this thread or task, and in tasks that it starts."""
    token = _present.set(tenant)
    try:
        yield
    finally:
        _present.reset(token)


def own_condition(tenant: str | None = None) -> tuple[str, tuple[Value, ...]]:
    """SQL that is true for a row t of `trajectories` that is the tenant's (None: the present one's), and its values."""
    tenant = present_tenant() if tenant is None else tenant
    return ("TRUE", ()) if tenant is None else (_OWNED, (tenant,))


def is_own(db: CatalogDatabase, trajectory_id: str) -> bool:
    """True if the present tenant may know of a trajectory."""
    condition, values = own_condition()
    if not values:
        return True
    where = f"WHERE t.id = ? AND {condition}"
    return db.read_one(f"SELECT 1 FROM trajectories t {where}", (trajectory_id, *values)) is not None
