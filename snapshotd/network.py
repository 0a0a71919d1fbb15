"""The network that a sandbox can reach, and the rules of one that reaches only some hosts.

A rule is a name (`pypi.org`), all names below one (`*.pypi.org`), every name (`*`), an address or a range of addresses
(`10.1.0.0/16`, `[fd00::]/8`), each with a port behind a colon or without one: then it means the ports of the web. With
`!` before it, it takes away what other rules allow, on every port if it names none. docs/network.md is the user's side.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.terms import ALLOW, MOST_RULES, NETWORK_MAX

WEB_PORTS = frozenset((80, 443))
"""Ports that a rule without one allows."""
_NAMES_PORT = 53
MOST_PORTS = 64
"""Ports that the rules of one sandbox name together: each takes a listening socket."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Range = ipaddress.IPv4Network | ipaddress.IPv6Network
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NAME_MAX = 253
_RULE = re.compile(r"(!?)(\[[^\]]*\](?:/\d+)?|[^:\[\]]*)(?::(\d{1,5}))?")


def clean_name(text: str) -> str | None:
    """A host's name in the one way in which names are compared; None for a text that is no such name."""
    name = text.lower().removesuffix(".")
    if not _NAME.fullmatch(name) or len(name) > _NAME_MAX or name.rpartition(".")[2].isdigit():
        return None
    return name


@dataclass(frozen=True, slots=True)
class HostRule:
    """One rule. Either `name` ("" stands for every name; with `below`, all names below it) or `range` is given. `port`:
    None if the rule has none. `denies`: it takes away."""

    text: str
    name: str | None
    below: bool
    range: _Range | None
    port: int | None
    denies: bool

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """The rule that a text means; `text` of it is the canonical form. UsageError."""
        found = _RULE.fullmatch(text.strip().lower())
        port = None if found is None or found[3] is None else int(found[3])
        if found is None or not found[2] or port == 0 or (port or 0) > 65535:
            raise _malformed(text)
        if port == _NAMES_PORT and not found[1]:
            raise UsageError(
                f"{text[:300]!a} is no rule that can be kept: on port 53 every connection is the proxy's, which answers for names"
            )
        mark, host, suffix = found[1], found[2], "" if port is None else f":{port}"
        if host == "*":
            return cls(f"{mark}*{suffix}", "", True, None, port, bool(mark))
        below = host.startswith("*.")
        name = clean_name(host.removeprefix("*."))
        if name is not None:
            return cls(f"{mark}{'*.' if below else ''}{name}{suffix}", name, below, None, port, bool(mark))
        try:
            addresses = ipaddress.ip_network(host.replace("[", "").replace("]", ""), strict=False)
        except ValueError:
            raise _malformed(text) from None
        shown = str(addresses.network_address) if addresses.num_addresses == 1 else str(addresses)
        if addresses.version == 6:
            shown = re.sub("^[^/]*", lambda address: f"[{address[0]}]", shown)
        return cls(f"{mark}{shown}{suffix}", None, False, addresses, port, bool(mark))

    def has_port(self, port: int) -> bool:
        """True if it is about this port."""
        if self.port is None:
            return self.denies or port in WEB_PORTS
        return port == self.port

    def has_name(self, name: str) -> bool:
        """True if it is about this name (`clean_name`)."""
        if self.name is None:
            return False
        return name.endswith(f".{self.name}" if self.name else "") if self.below else name == self.name

    def has_address(self, address: Address) -> bool:
        """True if it is about this address."""
        return self.range is not None and address.version == self.range.version and address in self.range

    def takes_all_of(self, other: HostRule) -> bool:
        """True if this denies everything that the other allows."""
        if not self.denies or self.port not in (None, other.port):
            return False
        if self.range is not None and other.range is not None:
            return self.range.version == other.range.version and self.range.supernet_of(other.range)  # type: ignore[arg-type]
        if self.name is None or other.name is None:
            return False
        if self.name == other.name:
            return self.below == other.below
        return self.below and self.has_name(other.name)

    def overlaps(self, other: HostRule) -> bool:
        """True if both allow, and what the other allows can be reached by this one, too: some host, on some port."""
        if self.denies or other.denies or (other.port is not None and not self.has_port(other.port)):
            return False
        if self.range is not None and other.range is not None:
            return self.range.overlaps(other.range)
        if self.name is not None and other.range is not None:
            return True  # a name may lead to any address
        if self.name is None or other.name is None:
            return False
        if self.below == other.below and self.name == other.name:
            return True
        return (self.below and self.has_name(other.name)) or (other.below and other.has_name(self.name))


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"{text[:300]!a} is no rule for hosts: write a name (pypi.org), names below one (*.pypi.org), or addresses (10.1.0.0/16), "
        "and perhaps a port (github.com:22); names in other scripts in their ASCII form (xn--...)"
    )


class HostRules:
    """The rules of one sandbox. A host is reached if a rule allows it and none denies it."""

    def __init__(self, texts: Iterable[str]) -> None:
        """UsageError: one is malformed; LimitExceeded: too many, or too many ports."""
        self.all = tuple({rule.text: rule for rule in map(HostRule.parse, texts)}.values())
        if len(self.all) > MOST_RULES:
            raise LimitExceeded(
                f"a sandbox has at most {MOST_RULES} rules for hosts: use names below a common one (*.NAME), or ranges"
            )
        if len(self.ports) > MOST_PORTS:
            raise LimitExceeded(f"the rules of a sandbox name at most {MOST_PORTS} ports: leave some out")

    @property
    def texts(self) -> tuple[str, ...]:
        """Their canonical texts, in the order in which they were given."""
        return tuple(rule.text for rule in self.all)

    @cached_property
    def ports(self) -> frozenset[int]:
        """The ports that the rules allow something on, and always those of the web, where a refusal tells its reason."""
        return WEB_PORTS | {rule.port for rule in self.all if rule.port is not None and not rule.denies}

    def allows_name(self, name: str, port: int | None = None) -> bool:
        """True if a name may be reached; without a port, if it may be reached on any."""
        mine = [rule for rule in self.all if rule.has_name(name)]
        if any(rule.denies and (rule.port is None or rule.port == port) for rule in mine):
            return False
        return any(not rule.denies and (port is None or rule.has_port(port)) for rule in mine)

    def allows_address(self, address: Address, port: int) -> bool:
        """True if an address may be reached that no name stands for."""
        mine = [rule for rule in self.all if rule.has_address(address) and rule.has_port(port)]
        return bool(mine) and not any(rule.denies for rule in mine)

    def denies_address(self, address: Address, port: int) -> bool:
        """True if a rule takes the address away, whatever name leads to it."""
        return any(rule.denies and rule.has_address(address) and rule.has_port(port) for rule in self.all)

    def names_range(self, address: Address, port: int, *, own: bool) -> bool:
        """True if a rule opens an address that is not public to names that lead there. `port`: 0 is any.
        A range that holds public addresses
        as well does not mean this machine's neighbours; and a public address that is this machine's `own` is meant by
        nothing but itself."""
        return any(
            rule.has_address(address)
            and not rule.denies
            and (not port or rule.port in (None, port))
            and rule.range is not None
            and _is_meant(rule.range, own=own)
            for rule in self.all
        )

    def with_changes(self, allow: Iterable[str], deny: Iterable[str]) -> HostRules:
        """These rules with hosts allowed and denied. To deny a host takes its rule away; if other rules still allow it,
        a rule that denies it is added. `*` denies everything: no rule is left. UsageError, LimitExceeded."""
        kept = {rule.text: rule for rule in self.all}
        for rule in map(_allowing, deny):
            if rule.text == "*":
                kept.clear()
                continue
            kept.pop(rule.text, None)
            if any(other.overlaps(rule) for other in kept.values()):
                denial = HostRule.parse(f"!{rule.text}")
                kept[denial.text] = denial
        for rule in map(_allowing, allow):
            kept.pop(f"!{rule.text}", None)
            covering = next((other for other in kept.values() if other.takes_all_of(rule)), None)
            if covering is not None:
                raise UsageError(
                    f"{rule.text} stays denied by the rule {covering.text}: allow {covering.text[1:]} first, or give all rules anew"
                )
            kept[rule.text] = rule
        return HostRules(kept)


def _allowing(text: str) -> HostRule:
    rule = HostRule.parse(text)
    if rule.denies:
        raise UsageError(f"{rule.text} is a rule that denies; name the host alone: {rule.text[1:]}")
    return rule


_PRIVATE_6 = tuple(map(ipaddress.IPv6Network, ("fc00::/7", "fe80::/10", "fec0::/10", "::1/128")))
_NEAR_4 = tuple(map(ipaddress.IPv4Network, ("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
"""Addresses that Python does not call private, and that are no host of the Internet either: those of providers' NAT (RFC
6598) and of protocols (RFC 6890; one is a cloud's metadata), of relays (RFC 7526), and the host of Azure's machines."""
_INTERNET_6 = ipaddress.IPv6Network("2000::/3")
"""All that has been given to the Internet (RFC 4291 2.4); of the rest, Python calls much global."""


def _is_meant(addresses: _Range, *, own: bool) -> bool:
    if own and addresses.num_addresses == 1:
        return True
    if isinstance(addresses, ipaddress.IPv6Network):
        return any(addresses.subnet_of(private) for private in _PRIVATE_6)
    return addresses.is_private or any(addresses.subnet_of(near) for near in _NEAR_4)


def is_public(address: Address) -> bool:
    """True if it is an address of the Internet: no loopback, private network, link, cloud metadata or multicast."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address in _INTERNET_6 and not any(address in part for part in _EMBEDDING)
    return not any(address in near for near in _NEAR_4)


_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/32")))
"""IPv6 addresses of the Internet that carry an IPv4 address, which would be reached through some gateway (RFC 3056, 4380)."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network that a sandbox can reach: none; `bridge`, the outside through NAT; `allow`, the hosts that its `rules`
    allow, through a proxy; or `host`, without isolation, the machine's own."""

    kind: str
    rules: tuple[str, ...] = ()

    NONE: ClassVar[Network]
    BRIDGE: ClassVar[Network]
    HOST: ClassVar[Network]

    @classmethod
    def parse(cls, text: str) -> Network:
        """From its text: `none`, `bridge`, `host`, or `allow:` and rules with commas between them. UsageError,
        LimitExceeded."""
        if text in _KINDS:
            return _KINDS[text]
        if not text.startswith(ALLOW):
            raise UsageError(
                f"{text[:80]!a} is no network: choose none, bridge, or allow: and the hosts that may be reached (allow:pypi.org,*.pypi.org)"
            )
        if len(text) > NETWORK_MAX:
            raise LimitExceeded(f"a network's text has at most {NETWORK_MAX} characters, and this one has {len(text)}")
        return cls.allowing(part for part in text.removeprefix(ALLOW).split(",") if part.strip())

    @classmethod
    def allowing(cls, rules: Iterable[str]) -> Network:
        """The network of these rules. UsageError, LimitExceeded."""
        return cls("allow", HostRules(rules).texts)

    @property
    def allows_names(self) -> bool:
        """True if its sandbox reaches what rules allow."""
        return self.kind == "allow"

    @property
    def without_rules(self) -> Network:
        """The part of it that a container depends on."""
        return Network(self.kind)

    def __str__(self) -> str:
        return f"{ALLOW}{','.join(self.rules)}" if self.allows_names else self.kind


_KINDS = {kind: Network(kind) for kind in ("none", "bridge", "host")}
Network.NONE, Network.BRIDGE, Network.HOST = _KINDS.values()
