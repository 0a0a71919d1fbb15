"""The name server that a sandbox finds at every address."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct

from snapshotd.egress import names
from snapshotd.egress.base import NotAllowed, printable
from snapshotd.egress.buffers import Buffers
from snapshotd.egress.lookup import Lookups, reachable
from snapshotd.egress.names import BadQuestion, NameQuestion, Pool
from snapshotd.egress.refusals import RefusalLog
from snapshotd.egress.stream import Stream
from snapshotd.network import HostRules, clean_name

IP_PKTINFO = 8
"""in.h; `socket` knows it from Python 3.14 on."""
_PACKET_INFO = struct.Struct("=I4s4s")
_AT_ONCE = 64
"""Datagrams that are taken before others have a turn."""
_MOST_ASKING = 256
_MOST_STREAMS = 32


class NameServer:
    """Answers questions for names: an allowed name gets an address of the pool, everything else does not exist."""

    def __init__(self, rules: HostRules, pool: Pool, lookups: Lookups, refusals: RefusalLog, buffers: Buffers) -> None:
        self._rules, self._buffers = rules, buffers
        self._pool, self._lookups, self._refusals = pool, lookups, refusals
        self._asking: set[asyncio.Task[None]] = set()
        self._streams = 0

    def change(self, rules: HostRules) -> None:
        """Apply other rules from now on."""
        self._rules = rules

    async def answer(self, question: NameQuestion) -> bytes:
        """The answer to one question."""
        name = clean_name(question.name)
        if name is None or not self._rules.allows_name(name):
            if not question.name.lower().endswith((".arpa", ".local")):  # questions that programs ask by themselves
                self._refusals.add(f"{printable(question.name, 255)}: no rule allows this name")
            return question.answer(names.NO_SUCH_NAME)
        try:
            found = reachable(await self._lookups.find(name), self._rules, 0)
        except NotAllowed as exc:
            self._refusals.add(exc.sentence(name))
            return question.answer(names.NO_SUCH_NAME)
        except (OSError, UnicodeError):
            return question.answer(names.SERVER_FAILURE)
        if not found:
            return question.answer(names.NO_SUCH_NAME)
        return question.answer(address=self._pool.address_of(name) if question.kind == names.A else None)

    # -- datagrams -----------------------------------------------------------------------------------------------------

    def take_datagrams(self, sock: socket.socket) -> None:
        """Answer the datagrams that have come to a socket, which tells where each was sent (IP_PKTINFO)."""
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, flags, sender = sock.recvmsg(names.QUESTION_MAX_BYTES, 64)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.ECONNREFUSED):
                    raise
                return
            if flags & socket.MSG_TRUNC or len(self._asking) >= _MOST_ASKING:
                continue
            with contextlib.suppress(BadQuestion):
                work = self._answer_datagram(sock, NameQuestion.parse(data), _target_of(ancillary), sender)
                task = asyncio.get_running_loop().create_task(work)
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _answer_datagram(
        self, sock: socket.socket, question: NameQuestion, asked: bytes, sender: tuple[str, int]
    ) -> None:
        """From the address that was asked: a client takes it from no other."""
        answer = await self.answer(question)
        info = (socket.IPPROTO_IP, IP_PKTINFO, _PACKET_INFO.pack(0, asked, bytes(4)))
        with contextlib.suppress(OSError):  # the client has gone, or its socket is full
            sock.sendmsg([answer], [info], 0, sender)

    # -- connections ---------------------------------------------------------------------------------------------------

    def take_connection(self, sock: socket.socket) -> None:
        """Answer the questions of one connection (RFC 7766)."""
        stream = Stream(sock, self._buffers)
        if self._streams >= _MOST_STREAMS:
            stream.close()
            return
        self._streams += 1
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _serve(self, stream: Stream) -> None:
        data = b""
        try:
            while True:
                head = stream.head()
                while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2]):
                    more = await head.receive()
                    if not more:
                        return
                    data += more
                end = 2 + int.from_bytes(data[:2])
                answer = await self.answer(NameQuestion.parse(data[2:end]))
                await stream.send(len(answer).to_bytes(2) + answer)
                data = data[end:]
        except (OSError, BadQuestion, NotAllowed):
            pass  # it has ended, or says nothing that could be answered
        finally:
            self._streams -= 1
            stream.close()


def _target_of(ancillary: list[tuple[int, int, bytes]]) -> bytes:
    return next(
        (_PACKET_INFO.unpack(data[:12])[2] for level, kind, data in ancillary if (level, kind) == (0, IP_PKTINFO)),
        bytes(4),
    )
