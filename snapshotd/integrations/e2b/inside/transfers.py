"""The content of files: `GET` and `POST /files`.

An upload is one call with one snapshot: the file is there whole or not at all. Files of a multipart request that fit into
memory are one call together. Nothing is spooled on this machine's disk: what is larger goes on to the sandbox as it comes.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import zlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from email.message import Message
from typing import Any, cast

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.inside.call import InnerCall
from snapshotd.integrations.e2b.inside.entries import Entries
from snapshotd.integrations.e2b.people import People

_TOGETHER_BYTES = 8 << 20
"""Files of so many bytes are written as one call."""
_FILES_MAX = 10_000
logging.getLogger("python_multipart").setLevel(logging.ERROR)
"""Its warnings are about bodies of clients, who are told themselves."""
UPLOADS_MAX, UPLOAD_WAIT_S = 32, 30.0
"""Uploads of one owner at once; more wait so long, and are refused."""
_IDLE_S = 300.0
"""An upload that brings nothing for so long is broken off."""


class UploadPlaces:
    """Room for so many uploads of one owner at once. Each holds a thread and some memory."""

    def __init__(self) -> None:
        self._places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(UPLOADS_MAX))

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and leave it behind. WireError: none becomes free in time."""
        places = self._places[owner]
        try:
            await asyncio.wait_for(places.acquire(), UPLOAD_WAIT_S)
        except TimeoutError as exc:
            raise WireError(
                "resource_exhausted", f"{UPLOADS_MAX} uploads are under way already; try again when one has ended"
            ) from exc
        try:
            yield
        finally:
            places.release()


class Transfers:
    """Files in and out."""

    def __init__(self, client: AsyncSnapshotd, people: People, entries: Entries, places: UploadPlaces) -> None:
        self._client, self._people, self._entries, self._places = client, people, entries, places

    async def get(self, call: InnerCall, request: Request) -> Response:
        path = self._path(call, request.query_params.get("path"))
        found = await self._entries.stat(call.box.id, path)
        if found.is_dir:
            raise WireError("invalid_argument", f"path {path} is a directory")
        pieces = self._client.read_file(call.box.id, path)
        first = await anext(pieces, b"")  # errors come before the head of the answer
        headers = {"content-disposition": "inline", "x-content-type-options": "nosniff"}
        return StreamingResponse(_all(first, pieces), media_type="application/octet-stream", headers=headers)

    async def post(self, call: InnerCall, request: Request) -> Response:
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise WireError("unimplemented", "snapshotd keeps no metadata of files; leave it out")
        message = Message()
        message["content-type"] = request.headers.get("content-type", "")
        async with self._places.take(call.box.owner):
            return await self._receive(call, request, message)

    async def _receive(self, call: InnerCall, request: Request, message: Message) -> Response:
        given = request.query_params.get("path")
        body = _decode_body(request)
        if message.get_content_type() == "multipart/form-data":
            boundary = message.get_param("boundary")
            if not isinstance(boundary, str) or not boundary:
                raise WireError("invalid_argument", "the multipart body has no boundary")
            return JSONResponse(await self._write_parts(call, given, _Parts(body, boundary)))
        path = self._path(call, given)
        await self._write(call, path, body)
        return JSONResponse([_written_json(path)])

    async def _write_parts(self, call: InnerCall, given: str | None, parts: _Parts) -> list[Json]:
        held: dict[str, bytes] = {}
        written = []
        async for name in parts.names():
            path = self._path(call, given if given is not None else name)
            written.append(_written_json(path))
            if len(written) > _FILES_MAX or (given is not None and len(written) > 1):
                raise WireError("invalid_argument", "the request has too many files, or one `path` for several")
            room = _TOGETHER_BYTES - sum(map(len, held.values()))
            content, more = await parts.content(room)
            if more:
                await self._write_held(call, held)
                await self._write(call, path, _all(content, parts.rest()))
            else:
                held[path] = content
        if not written:
            raise WireError("invalid_argument", "the request has no file; send a part with a file name")
        await self._write_held(call, held)
        return written

    async def _write_held(self, call: InnerCall, held: dict[str, bytes]) -> None:
        if len(held) == 1:
            ((path, content),) = held.items()
            await self._client.write_file(call.box.id, path, content, user=call.person.name)
        elif held:
            await self._client.write_files(call.box.id, held, user=call.person.name)
        held.clear()

    async def _write(self, call: InnerCall, path: str, content: AsyncIterator[bytes]) -> None:
        source = _Incoming(content)
        try:
            await self._client.write_file(call.box.id, path, source, user=call.person.name)
        finally:
            await source.close()

    def _path(self, call: InnerCall, path: str | None) -> str:
        if not path or "\0" in path:
            raise WireError("invalid_argument", "the request names no file; give its `path`")
        return self._people.path(call.box, call.person, path)


class _Incoming:
    """The body of a client, as a file that a thread reads while the loop receives it."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._loop = pieces, asyncio.get_running_loop()
        self._rest = memoryview(b"")
        self._waiting: Any = None

    def read(self, count: int, /) -> bytes:
        """Errors: those of the connection. TimeoutError: nothing came for long."""
        while not self._rest:
            self._waiting = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            piece = self._waiting.result()
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        taken, self._rest = bytes(self._rest[:count]), self._rest[count:]
        return taken

    async def _next(self) -> bytes | None:
        return await asyncio.wait_for(anext(self._pieces, None), _IDLE_S)

    async def close(self) -> None:
        """Nothing is read any more."""
        if self._waiting is not None:
            self._waiting.cancel()  # lets the thread go
        if (close := getattr(self._pieces, "aclose", None)) is not None:
            try:
                await close()
            except RuntimeError:
                pass  # it is just being read, and has been cancelled


class _Parts:
    """The files of a multipart body, one behind the other, as they come."""

    def __init__(self, body: AsyncIterator[bytes], boundary: str) -> None:
        self._body = body
        self._events = deque[tuple[str, bytes]]()
        self._field, self._headers = b"", dict[str, str]()
        self._value = b""
        self._inside = False
        take = self._events.append
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: take(("begin", b"")),
                "on_header_field": lambda data, start, end: take(("field", data[start:end])),
                "on_header_value": lambda data, start, end: take(("value", data[start:end])),
                "on_header_end": lambda: take(("header", b"")),
                "on_headers_finished": lambda: take(("headers", b"")),
                "on_part_data": lambda data, start, end: take(("data", data[start:end])),
                "on_part_end": lambda: take(("end", b"")),
                "on_end": lambda: take(("over", b"")),
            },
        )

    async def names(self) -> AsyncIterator[str]:
        """The name of each file; its content has to be read before the next one. WireError: the body is no multipart, or
        ends too soon."""
        while True:
            kind, data = await self._next()
            if kind == "over":
                return
            if kind == "begin":
                self._headers, self._field, self._value = {}, b"", b""
            elif kind == "field":
                self._field += data
            elif kind == "value":
                self._value += data
            elif kind == "header":
                self._headers[self._field.decode("latin-1").lower()] = self._value.decode(errors="surrogateescape")
                self._field = self._value = b""
            elif kind == "headers" and (name := self._file_name()) is not None:
                self._inside = True
                yield name
                while self._inside:  # the caller did not want it
                    await self._piece()

    async def content(self, most: int) -> tuple[bytes, bool]:
        """The content of the present file, and if there is more of it than `most`."""
        data = bytearray()
        while len(data) <= most:
            piece = await self._piece()
            if piece is None:
                return bytes(data), False
            data += piece
        return bytes(data), True

    async def rest(self) -> AsyncIterator[bytes]:
        while (piece := await self._piece()) is not None:
            yield piece

    async def _piece(self) -> bytes | None:
        if not self._inside:
            return None
        kind, data = await self._next()
        self._inside = kind == "data"
        return data if self._inside else None

    async def _next(self) -> tuple[str, bytes]:
        while not self._events:
            piece = await anext(self._body, None)
            if piece is None:
                raise WireError("invalid_argument", "the multipart body ends too soon")
            try:
                self._parser.write(piece)
            except MultipartParseError as exc:
                raise WireError("invalid_argument", f"the multipart body cannot be read: {exc}") from exc
        return self._events.popleft()

    def _file_name(self) -> str | None:
        message = Message()
        message["content-disposition"] = self._headers.get("content-disposition", "")
        return message.get_filename()


async def _all(first: bytes, more: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async with aclosing(cast(Any, more)) as pieces:
        async for piece in pieces:
            yield piece


async def _decode_body(request: Request) -> AsyncIterator[bytes]:
    """The body as it was before `Content-Encoding`."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise WireError("invalid_argument", f"the content encoding {encoding!r} is not read; use gzip or none")
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 16) if encoding == "gzip" else None
    try:
        async for piece in request.stream():
            while piece:
                if inflater is None:
                    yield piece
                    break
                data = inflater.decompress(piece, 1 << 20)
                piece = inflater.unconsumed_tail
                if data:
                    yield data
    except zlib.error as exc:
        raise WireError("invalid_argument", f"the body is no gzip: {exc}") from exc
    if inflater is not None and not inflater.eof:
        raise WireError("invalid_argument", "the gzip body ends too soon")


def _written_json(path: str) -> Json:
    return {"name": posixpath.basename(path), "path": path, "type": "file"}
