"""Questions for names, and their answers: as much of DNS (RFC 1035) as a sandbox's resolver needs."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv4Address

from snapshotd.egress.base import POOL, POOL_FIRST
from snapshotd.network import Address

A, ANY_CLASS, INTERNET = 1, 255, 1
NO_ERROR, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3
QUESTION_MAX_BYTES = 4096
"""Longest datagram that is read. A question is shorter; more would be extensions that nobody here reads."""
TTL_S = 30
_HEADER = struct.Struct("!HHHHHH")
_RESPONSE, _RECURSION_DESIRED, _RECURSION_AVAILABLE, _OPCODE = 0x8000, 0x0100, 0x0080, 0x7800
_NAME_BYTES = 255
MOST_NAMES = 4096
"""Names that have an address at once: the least recently used one gives its up."""


class BadQuestion(Exception):  # noqa: N818 - the sandbox's bytes are at fault
    """No question that could be answered."""


@dataclass(frozen=True, slots=True)
class NameQuestion:
    """One question. `name`: its labels as they came, with dots between them; any bytes, as Latin-1."""

    number: int
    flags: int
    name: str
    kind: int
    raw: bytes
    """The question's own bytes, for the answer."""

    @classmethod
    def parse(cls, data: bytes) -> NameQuestion:
        """BadQuestion."""
        if len(data) < _HEADER.size:
            raise BadQuestion
        number, flags, questions, *_ = _HEADER.unpack_from(data)
        if flags & (_RESPONSE | _OPCODE) or questions != 1:
            raise BadQuestion
        labels, at = [], _HEADER.size
        while True:
            if at >= len(data) or at > _HEADER.size + _NAME_BYTES:
                raise BadQuestion
            length = data[at]
            at += 1
            if length == 0:
                break
            if length > 63 or at + length > len(data):  # a pointer, which a question has no use for
                raise BadQuestion
            labels.append(data[at : at + length].decode("latin-1"))
            at += length
        if at + 4 > len(data) or at > _HEADER.size + _NAME_BYTES:
            raise BadQuestion
        kind, family = struct.unpack_from("!HH", data, at)
        if family not in (INTERNET, ANY_CLASS):
            raise BadQuestion
        return cls(number, flags, ".".join(labels), kind, data[_HEADER.size : at + 4])

    def answer(self, code: int = NO_ERROR, address: IPv4Address | None = None) -> bytes:
        """The answer: an address, none, or a refusal."""
        flags = _RESPONSE | _RECURSION_AVAILABLE | (self.flags & _RECURSION_DESIRED) | code
        head = _HEADER.pack(self.number, flags, 1, 0 if address is None else 1, 0, 0)
        if address is None:
            return head + self.raw
        record = struct.pack("!HHHIH4s", 0xC00C, A, INTERNET, TTL_S, 4, address.packed)
        return head + self.raw + record


class Pool:
    """Addresses that stand for names. One is given away anew only when all others were since."""

    def __init__(self) -> None:
        self._size = POOL.num_addresses - POOL_FIRST - 1
        self._next = random.randrange(self._size)  # an address that an earlier proxy gave means nothing here
        self._by_name: OrderedDict[str, IPv4Address] = OrderedDict()
        self._by_address: dict[Address, str] = {}

    def address_of(self, name: str) -> IPv4Address:
        """The address that stands for a name."""
        address = self._by_name.get(name)
        if address is None:
            address = POOL[POOL_FIRST + self._next]
            self._next = (self._next + 1) % self._size
            self._by_name[name], self._by_address[address] = address, name
            if len(self._by_name) > MOST_NAMES:
                del self._by_address[self._by_name.popitem(last=False)[1]]
        self._by_name.move_to_end(name)
        return address

    def name_of(self, address: Address) -> str | None:
        """The name that an address stands for; None: none, or it was given up."""
        return self._by_address.get(address)
