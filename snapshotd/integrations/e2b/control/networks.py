"""The network that a client wants for a sandbox, in the daemon's words.

E2B's sandboxes reach everything but what is denied, and what is allowed goes before what is denied. The daemon's reach what rules
allow, on the ports of the web, and a denial goes before (docs/network.md).
"""

from __future__ import annotations

import re
from typing import Any

from snapshotd.api.record import Json
from snapshotd.errors import NotPermitted
from snapshotd.integrations.e2b.failures import WireError, unsupported
from snapshotd.network import HostRule, Network
from snapshotd.terms import DEFAULT_TENANT

ALL_TRAFFIC = "0.0.0.0/0"
_EVERYTHING = "*", ALL_TRAFFIC
_RULE_6 = re.compile(r"^([^\[\]/]*:[^\[\]/]*:[^\[\]/]*)(/\d+)?$")
"""An IPv6 address, which has brackets in a rule."""
_NOT_HERE = "egressProxy", "rules", "dnsServers", "httpsPorts", "maskRequestHost"


def network_of(given: Json, default: str) -> str:
    """The network of a new sandbox. `given` has `allow_internet_access` and the lists of addresses. `default`: the one of a sandbox
    that does not say; if it has rules, they are what a sandbox with access to the internet reaches. UsageError, WireError."""
    for name in _NOT_HERE:
        if given.get(name):
            raise unsupported(f"`{name}` for a network", "leave it out")
    allow, deny = _addresses(given, "allowOut"), _addresses(given, "denyOut")
    internet = given.get("allow_internet_access")
    if internet is False or ALL_TRAFFIC in deny:
        return str(Network.allowing(allow))
    has_rules = Network.parse(default).allows_names
    if not deny:
        return default if has_rules or (internet is None and not allow) else "bridge"
    for denied in map(HostRule.parse, deny):
        if both := [one for one in allow if denied.overlaps(HostRule.parse(one))]:
            raise unsupported(f"address that is allowed within a denied range ({both[0]})", "deny smaller ranges")
    return str(Network.allowing([*rules_of(default if has_rules else "bridge"), *(f"!{one}" for one in deny)]))


def network_for(tenant: str, given: Json, default: str) -> str:
    """As `network_of`, as far as a client of this tenant may have it (docs/access.md): all that is public in place of the bridge,
    and hosts by their names, since the machine may have neighbours that only it reaches. The default tenant is the server's own
    user. NotPermitted, and the errors of `network_of`."""
    found = network_of(given, default)
    if tenant == DEFAULT_TENANT:
        return found
    for rule in map(HostRule.parse, _addresses(given, "allowOut")):
        if rule.range is not None and rule.text != ALL_TRAFFIC:
            raise NotPermitted(
                f"{rule.text} is an address, which may be of the server's own network; allow hosts by their names"
            )
    return str(Network.allowing(_EVERYTHING)) if found == "bridge" else found


def rules_of(network: str) -> tuple[str, ...]:
    """The rules that stand for a network where a sandbox can have no other than rules."""
    return _EVERYTHING if network == "bridge" else Network.parse(network).rules


def lists_of(given: Json) -> Json:
    """The lists of a wish, as the client is told of them later."""
    return {name: given[name] for name in ("allowOut", "denyOut") if given.get(name)}


def _addresses(given: Json, name: str) -> list[str]:
    found: Any = given.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise WireError("invalid_argument", f"`{name}` has to be a list of addresses and names")
    return [_RULE_6.sub(r"[\1]\2", one) for one in found]
