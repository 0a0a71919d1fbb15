"""The key-value store, which outlives runs and trajectories."""

from __future__ import annotations

from typing import Annotated, Any

from snapshotd.api.history import NAME_MAX
from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, Request, field, record
from snapshotd.api.wire import TTL_MAX_S
from snapshotd.terms import DEFAULT_TENANT


@record(frozen=True)
class ValueInfo(ApiRecord):
    """One version of a value of the key-value store."""

    tenant: str
    namespace: str
    """The part of the store that the key is in."""
    key: str
    version: int
    value: Any
    """The value that is stored."""
    created_at: str
    expires_at: str | None
    is_deleted: bool
    """True: this version says that the key was removed."""


@record(frozen=True)
class PutValueRequest(Request):
    value: Any
    ttl_s: Annotated[float, Bounds(gt=0, le=TTL_MAX_S, allow_inf_nan=False)] | None = None
    """It is gone after so many seconds."""
    expected_version: Annotated[int, Bounds(ge=0, le=1 << 53)] | None = None
    """The version that must be there; 0: none."""


@record(frozen=True)
class SearchRequest(Request):
    namespace: Annotated[str, Bounds(max_length=8 * NAME_MAX)]
    """Namespaces below it are searched, too."""
    tenant: Annotated[str, Bounds(max_length=NAME_MAX)] = DEFAULT_TENANT
    prefix: Annotated[str, Bounds(max_length=NAME_MAX)] = ""
    """Beginning of the key."""
    where: Annotated[dict[str, str | int | float | bool | None], Bounds(max_length=100)] = field(default_factory=dict)
    """Fields of the value (dotted paths) that must equal these."""
    limit: Annotated[int, Bounds(ge=1, le=10_000)] = 100
    after: Annotated[str, Bounds(max_length=NAME_MAX)] = ""
    """Only keys behind this one."""


GET_VALUE = Operation("GET", "/store/value", ValueInfo, READ, "store")
PUT_VALUE = Operation("PUT", "/store/value", ValueInfo, RUN, "store", body=PutValueRequest)
DELETE_VALUE = Operation[None]("DELETE", "/store/value", None, RUN, "store")
VALUE_HISTORY = Operation("GET", "/store/history", list[ValueInfo], READ, "store")
SEARCH_VALUES = Operation("POST", "/store/search", list[ValueInfo], READ, "store", body=SearchRequest)
