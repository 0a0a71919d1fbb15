"""The control API about sandboxes and their snapshots."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotFound, SnapshotdError, UsageError
from snapshotd.integrations.e2b.boxes import Boxes
from snapshotd.integrations.e2b.control import asking
from snapshotd.integrations.e2b.control.building import moment
from snapshotd.integrations.e2b.control.networks import lists_of, network_for, rules_of
from snapshotd.integrations.e2b.control.templates import DEFAULT_TAG, TemplateCatalog
from snapshotd.integrations.e2b.failures import WireError, failure_of, not_found, unsupported
from snapshotd.integrations.e2b.keys import AccessKeys
from snapshotd.integrations.e2b.records import Box, Build, KeptSnapshot, Records, variant_of
from snapshotd.terms import ALLOW

ENVD_VERSION = "0.6.1"
"""The abilities of this server, in the numbers of `envd`: uploads as they are, the sandbox's own user. From 0.6.2 on the SDKs
offer metadata of files, which are refused here."""
FORK_MAX = 20
_PAGE, _PAGE_MAX = 100, 1000
_CLIENT = "snapshotd"
T = TypeVar("T")
Handler = Callable[[str, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class SandboxRoutes:
    """`domain`: below it sandboxes and their ports have hosts. `network`: of sandboxes that do not say."""

    client: AsyncSnapshotd
    records: Records
    boxes: Boxes
    templates: TemplateCatalog
    keys: AccessKeys
    domain: str
    network: str

    def routes(self, given: Callable[[Handler], Callable[[Request], Awaitable[Response]]]) -> list[Route]:
        """`given`: a handler that gets the owner of the request's key."""
        one = "/sandboxes/{sandbox}"
        rows: list[tuple[str, str, Handler]] = [
            ("POST", "/sandboxes", self._create),
            ("GET", "/sandboxes", self._list),
            ("GET", one, self._get),
            ("DELETE", one, self._kill),
            ("POST", f"{one}/timeout", self._timeout),
            ("POST", f"{one}/refreshes", self._refresh),
            ("POST", f"{one}/pause", self._pause),
            ("POST", f"{one}/resume", self._connect),
            ("POST", f"{one}/connect", self._connect),
            ("POST", f"{one}/fork", self._fork),
            ("POST", f"{one}/snapshots", self._snapshot),
            ("PUT", f"{one}/network", self._set_network),
            ("GET", f"{one}/metrics", self._metrics),
            ("GET", "/snapshots", self._snapshots),
        ]
        return [
            Route(f"{version}{path}", given(handler), methods=[method])
            for method, path, handler in rows
            for version in ("", "/v2")
        ]

    async def _create(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        asking.refuse_extras(given)
        now, net = time.time(), given.get("network") or {}
        if not isinstance(net, dict):
            raise WireError("invalid_argument", "`network` has to be an object")
        network = network_for(owner, {**net, "allow_internet_access": given.get("allow_internet_access")}, self.network)
        resumes = given.get("autoResume") or {}
        draft = Box(
            id="",
            owner=owner,
            template="",
            started_at=now,
            ends_at=now + asking.seconds(given),
            metadata=asking.texts(given, "metadata"),
            env=asking.variables(given, "envVars"),
            pauses_at_end=given.get("autoPause") is True,
            resumes=isinstance(resumes, dict) and resumes.get("enabled") is True,
            is_public=net.get("allowPublicTraffic") is not False,
            network={"allowInternetAccess": _has_internet(network), **lists_of(net)},
        )
        ref = asking.maybe_text(given, "templateID") or "base"
        kept = await self.templates.snapshot(owner, ref)
        origin: Box | Build
        if kept is not None:
            origin, template, alias = Box.of(kept.box), kept.id, None
            snapshot, variant = kept.id, {}
        else:
            found, origin = await self.templates.build_of(owner, ref)
            template, alias = found.id, found.name
            snapshot, variant = origin.snapshot, variant_of(origin)
        draft = dataclasses.replace(
            draft,
            template=template,
            alias=alias,
            env={**origin.env, **draft.env},
            user=origin.user,
            workdir=origin.workdir,
            start=origin.start,
            ready=origin.ready,
        )
        key = request.headers.get("idempotency-key")
        box = await self.boxes.create(snapshot, {**variant, "network": network}, draft, key=key)
        return JSONResponse(self._maker_json(box), 201)

    async def _list(self, owner: str, request: Request) -> Response:
        query = request.query_params
        wanted = {unquote(name): unquote(value) for name, value in parse_qsl(query.get("metadata", ""))}
        states = {state for given in query.getlist("state") for state in given.split(",") if state}
        after, template = _moment_of(query.get("startedAfter")), query.get("template")
        found = [
            box
            for box in await self.boxes.all_of(owner)
            if wanted.items() <= box.metadata.items()
            and (not states or _state(box) in states)
            and (after is None or box.started_at > after)
            and template in (None, box.template, box.alias)
        ]
        found.sort(key=lambda box: (box.started_at, box.id), reverse=query.get("order", "desc") != "asc")
        page, headers = _page(found, request)
        told = [await self._list_json(box) for box in page]
        return JSONResponse([one for one in told if one is not None], headers=headers)

    async def _get(self, owner: str, request: Request) -> Response:
        box = await self.boxes.find(owner, request.path_params["sandbox"])
        more = {
            "domain": self.domain,
            "envdAccessToken": self.keys.token(box.id),
            "allowInternetAccess": box.network.get("allowInternetAccess", True),
            "network": {"allowPublicTraffic": box.is_public, **lists_of(box.network)},
            "lifecycle": {"onTimeout": "pause" if box.pauses_at_end else "kill", "autoResume": box.resumes},
        }
        if (told := await self._list_json(box)) is None:
            raise not_found(box.id)
        return JSONResponse({**told, **more})

    async def _kill(self, owner: str, request: Request) -> Response:
        await self.boxes.kill(owner, request.path_params["sandbox"])
        return Response(status_code=204)

    async def _timeout(self, owner: str, request: Request) -> Response:
        seconds = asking.seconds(await asking.body(request), default=None)
        await self.boxes.set_end(owner, request.path_params["sandbox"], seconds)
        return Response(status_code=204)

    async def _refresh(self, owner: str, request: Request) -> Response:
        seconds = asking.seconds(await asking.body(request), "duration", 60)
        await self.boxes.set_end(owner, request.path_params["sandbox"], seconds)
        return Response(status_code=204)

    async def _pause(self, owner: str, request: Request) -> Response:
        await asking.body(request)  # older SDKs always ask for the memory, so this cannot be refused
        await self.boxes.pause(owner, request.path_params["sandbox"])
        return Response(status_code=204)

    async def _connect(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        timeout_s = None if given.get("timeout") is None else asking.seconds(given)
        box, was_paused = await self.boxes.resume(owner, request.path_params["sandbox"], timeout_s)
        return JSONResponse(self._maker_json(box), 201 if was_paused or request.url.path.endswith("resume") else 200)

    async def _fork(self, owner: str, request: Request) -> Response:
        given, sandbox = await asking.body(request), request.path_params["sandbox"]
        count = asking.number(given, "count", 1, least=1)
        if count != int(count) or count > FORK_MAX:
            raise WireError("invalid_argument", f"`count` has to be 1 to {FORK_MAX}")
        box = await self.boxes.find(owner, sandbox)
        if box.paused:
            raise WireError("aborted", f"sandbox {sandbox} is paused; connect to it first")
        try:
            forked = await self.boxes.fork(owner, sandbox, int(count), asking.seconds(given))
        except SnapshotdError as exc:
            failure = failure_of(exc)
            told: list[Json] = [{"error": {"code": failure.status, "message": failure.message}}] * int(count)
            return JSONResponse(told, 201)
        return JSONResponse([{"sandbox": self._maker_json(one)} for one in forked], 201)

    async def _snapshot(self, owner: str, request: Request) -> Response:
        given, sandbox = await asking.body(request), request.path_params["sandbox"]
        asking.refuse_memory(given)
        box = await self.boxes.find(owner, sandbox)
        names = list[str]()
        before: KeptSnapshot | None = None
        if (name := asking.maybe_text(given, "name")) is not None:
            plain, tag = asking.name_and_tag(name)
            names = [f"{plain}:{tag or DEFAULT_TAG}"]
            if await self.templates.look_up(owner, plain) is not None:
                raise WireError("aborted", f"{plain!r} is the name of a template; choose another name")
            before = await self.templates.snapshot(owner, names[0])
        snapshot = await self.boxes.take_snapshot(box)
        if before is not None and before.id != snapshot:  # the name moves on
            left = [one for one in before.names if one not in names]
            await self.records.put(dataclasses.replace(before, names=left))
        known = await self.records.find(KeptSnapshot, snapshot)
        names = [*dict.fromkeys([*(known.names if known is not None else []), *names])]
        kept = KeptSnapshot(snapshot, owner, f"e2b-{snapshot[:16]}", time.time(), names, dataclasses.asdict(box))
        await self.client.tag(snapshot, kept.tag, move=True)  # so that no prune takes it
        for own in map(_own_tag, names):
            try:
                await self.client.tag(snapshot, own, move=before is not None)  # so that commands know it by its name
            except (Conflict, UsageError):
                pass  # somebody else has that name
        await self.records.put(kept)
        return JSONResponse({"snapshotID": kept.id, "names": kept.names}, 201)

    async def _snapshots(self, owner: str, request: Request) -> Response:
        sandbox, name = request.query_params.get("sandboxID"), request.query_params.get("name")
        found = [
            kept
            async for kept in self.records.all_of(KeptSnapshot, owner=owner)
            if sandbox in (None, kept.box["id"])
            and (name is None or name in kept.names or f"{name}:{DEFAULT_TAG}" in kept.names)
        ]
        found.sort(key=lambda kept: (kept.taken_at, kept.id), reverse=True)
        page, headers = _page(found, request)
        return JSONResponse([{"snapshotID": kept.id, "names": kept.names} for kept in page], headers=headers)

    async def remove_snapshot(self, kept: KeptSnapshot) -> None:
        """Remove a snapshot's names and tags. Sandboxes that were made of it stay."""
        tags = (await self.client.snapshot(kept.id)).tags
        for tag in {kept.tag, *map(_own_tag, kept.names)} & set(tags):
            await self.client.untag(tag)
        await self.records.drop(kept)

    async def _set_network(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        box = await self.boxes.find(owner, request.path_params["sandbox"])
        wanted, now = network_for(owner, given, self.network), (await self.client.trajectory(box.id)).network
        if wanted != now:
            if not now.startswith(ALLOW):
                raise unsupported(
                    f"change of the network {now!r}",
                    "make a sandbox with `network` or without access to the internet, or serve with --network 'allow:*'",
                )
            await self.client.network(box.id, only=rules_of(wanted))
        await self.boxes.set_network(owner, box.id, {"allowInternetAccess": _has_internet(wanted), **lists_of(given)})
        return Response(status_code=204)

    async def _metrics(self, owner: str, request: Request) -> Response:
        box = await self.boxes.find(owner, request.path_params["sandbox"])
        return JSONResponse(
            [] if box.paused else [told for told in [await measure(self.client, box)] if told is not None]
        )

    # -- answers -------------------------------------------------------------------------------------------------------

    def _maker_json(self, box: Box) -> Json:
        """A sandbox, in the form that its maker gets."""
        told = {
            "sandboxID": box.id,
            "templateID": box.template,
            "clientID": _CLIENT,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.keys.token(box.id),
            "domain": self.domain,
        }
        if box.alias is not None:
            told["alias"] = box.alias
        return told if box.is_public else {**told, "trafficAccessToken": self.keys.token(box.id, "traffic")}

    async def _list_json(self, box: Box) -> Json | None:
        """A sandbox, in the form of lists; None: a person has removed it."""
        try:
            limits = (await self.client.trajectory(box.id)).limits
        except NotFound:
            return None
        told: Json = {
            "sandboxID": box.id,
            "templateID": box.template,
            "clientID": _CLIENT,
            "startedAt": moment(box.started_at),
            "endAt": moment(box.ends_at),
            "cpuCount": max(1, round(limits.cpus)),
            "memoryMB": limits.memory_bytes >> 20,
            "diskSizeMB": limits.disk_bytes >> 20,
            "metadata": box.metadata,
            "state": _state(box),
            "envdVersion": ENVD_VERSION,
        }
        return told if box.alias is None else {**told, "alias": box.alias}


async def measure(client: AsyncSnapshotd, box: Box) -> Json | None:
    """The use of a sandbox now; None: it does not run."""
    stats = await client.stats(trajectories=1)
    for one in stats.sandboxes:
        if one.trajectory == box.id:
            lived_s = max(time.time() - (_moment_of(one.started_at) or 0.0), 0.001)
            return {
                "timestamp": moment(time.time()),
                "timestampUnix": int(time.time()),
                "cpuCount": max(1, round(one.cpus)),
                "cpuUsedPct": round(one.cpu_ms / 10 / lived_s, 2),
                "memUsed": one.used_memory_bytes,
                "memTotal": one.memory_bytes,
                "memCache": 0,
                "diskUsed": 0,
                "diskTotal": 0,
            }
    return None


def _has_internet(network: str) -> bool:
    return network not in ("none", ALLOW)


def _own_tag(name: str) -> str:
    """The daemon's tag for the name of a snapshot."""
    return name.removesuffix(f":{DEFAULT_TAG}").replace(":", "-")


def _state(box: Box) -> str:
    return "paused" if box.paused else "running"


def _moment_of(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError as exc:
        raise WireError("invalid_argument", f"{text!r} is no time") from exc


def _page(found: list[T], request: Request) -> tuple[list[T], dict[str, str]]:
    """One page, and the header that leads to the next one."""
    query = request.query_params
    try:
        limit, at = int(query.get("limit", _PAGE)), int(query.get("nextToken", 0))
    except ValueError as exc:
        raise WireError("invalid_argument", "`limit` and `nextToken` have to be numbers") from exc
    if not 1 <= limit <= _PAGE_MAX or at < 0:
        raise WireError("invalid_argument", f"`limit` has to be 1 to {_PAGE_MAX}")
    more = {"x-next-token": str(at + limit)} if at + limit < len(found) else {}
    return found[at : at + limit], more
