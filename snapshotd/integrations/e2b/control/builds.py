"""The control API about templates and their builds. A build goes on in this server; one that is cut off with it is forgotten,
and its client meets a build that is not there."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.e2b.control import asking
from snapshotd.integrations.e2b.control.archives import StepArchives
from snapshotd.integrations.e2b.control.building import Builder, TemplateBuild, moment, new_build, note
from snapshotd.integrations.e2b.control.networks import network_for
from snapshotd.integrations.e2b.control.sandboxes import ENVD_VERSION, Handler, SandboxRoutes
from snapshotd.integrations.e2b.control.templates import DEFAULT_TAG, TemplateCatalog
from snapshotd.integrations.e2b.failures import WireError, answer, unsupported
from snapshotd.integrations.e2b.inside.transfers import UploadPlaces
from snapshotd.integrations.e2b.keys import AccessKeys
from snapshotd.integrations.e2b.people import People
from snapshotd.integrations.e2b.records import BoxTemplate, Build, build_of

_KEPT_BUILDS = 1000
_LOG_PAGE = 100
_DIGITS_MAX = 18
"""The digits of a number; a much longer one would not be read (`sys.get_int_max_str_digits`)."""
_log = logging.getLogger(__name__)


class BuildRoutes:
    """The builds of this server, and the archives that clients upload for them."""

    def __init__(
        self,
        client: AsyncSnapshotd,
        people: People,
        templates: TemplateCatalog,
        sandboxes: SandboxRoutes,
        keys: AccessKeys,
        places: UploadPlaces,
    ) -> None:
        self._client, self._people, self._templates, self._sandboxes = client, people, templates, sandboxes
        self._keys, self._places, self._archives = keys, places, StepArchives()
        self._builds: dict[str, TemplateBuild] = {}

    def routes(self, given: Callable[[Handler], Callable[[Request], Awaitable[Response]]]) -> list[Route]:
        """`given`: a handler that gets the owner of the request's key."""
        one = "/templates/{template:path}"
        rows: list[tuple[str, str, Handler]] = [
            ("POST", "/v3/templates", self._request),
            ("POST", "/v2/templates/{template}/builds/{build}", self._start),
            ("GET", "/templates/{template}/builds/{build}/status", self._status),
            ("GET", "/templates/{template}/files/{digest}", self._upload_link),
            ("GET", "/templates/aliases/{template:path}", self._alias),
            ("POST", "/templates/tags", self._tag),
            ("DELETE", "/templates/tags", self._untag),
            ("GET", "/templates/{template:path}/tags", self._tags),
            ("GET", "/templates", self._list),
            ("GET", "/v2/templates", self._list),
            ("GET", one, self._get),
            ("DELETE", one, self._remove),
        ]
        upload = Route("/templates/uploads/{digest}", self._upload, methods=["PUT"], name="upload")
        return [upload, *(Route(path, given(handler), methods=[method]) for method, path, handler in rows)]

    async def close(self) -> None:
        """End the builds that go on, and remove what was uploaded."""
        tasks = [one.task for one in self._builds.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._archives.close)

    async def _request(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        name, tag = asking.name_and_tag(asking.maybe_text(given, "name"))
        tags = [*dict.fromkeys([*([tag] if tag else []), *asking.tags(given)])] or [DEFAULT_TAG]
        cpus, memory = given.get("cpuCount"), given.get("memoryMB")
        known = await self._templates.look_up(owner, name)
        building = TemplateBuild(
            new_build(),
            owner,
            known.id if known is not None else uuid4().hex[:20],
            name,
            tags,
            None if cpus is None else asking.number(given, "cpuCount", least=0.01),
            None if memory is None else int(asking.number(given, "memoryMB", least=16)),
        )
        for old in [one for one in self._builds.values() if one.task is None or one.task.done()][:-_KEPT_BUILDS]:
            del self._builds[old.id]
        self._builds[building.id] = building
        told = {"templateID": building.template, "buildID": building.id, "public": False, "names": [name]}
        return JSONResponse({**told, "aliases": [name], "tags": tags}, 202)

    async def _start(self, owner: str, request: Request) -> Response:
        given, building = await asking.body(request), self._find(owner, request)
        if building.task is not None:
            raise WireError("aborted", f"build {building.id} has begun already")
        if given.get("fromImageRegistry"):
            raise unsupported("credentials of registries", "import the image (`snapshotd image import`) and name it")
        image, base = asking.maybe_text(given, "fromImage"), asking.maybe_text(given, "fromTemplate")
        if (image is None) == (base is None):
            raise WireError("invalid_argument", "give either `fromImage` or `fromTemplate`")
        steps = given.get("steps") or []
        if not isinstance(steps, list) or not all(isinstance(one, dict) for one in steps):
            raise WireError("invalid_argument", "`steps` has to be a list of objects")
        source = None if base is None else (await self._templates.build_of(owner, base))[1]
        start, ready = asking.maybe_text(given, "startCmd"), asking.maybe_text(given, "readyCmd")
        building.status = "building"
        building.task = asyncio.create_task(self._build(building, image, source, steps, start, ready))
        return Response(status_code=202)

    async def _build(
        self,
        building: TemplateBuild,
        image: str | None,
        base: Build | None,
        steps: list[Json],
        start: str | None,
        ready: str | None,
    ) -> None:
        builder = Builder(
            self._client,
            self._people,
            building,
            lambda digest: self._archives.find(building.owner, digest),
            network_for(building.owner, {}, self._sandboxes.network),
        )
        try:
            wanted = None if image is None else self._templates.image(image)
            build = await builder.build(wanted, base, steps, start, ready)
            await self._templates.put(building.owner, building.template, building.name, building.tags, build)
            note(building, "Build finished")
            building.status = "ready"
        except (SnapshotdError, WireError) as exc:
            building.reason = building.reason or {"message": exc.message}
            note(building, building.reason["message"], level="error")
            building.status = "error"
        except Exception:  # noqa: BLE001 - the task's top: its client asks how it ended
            _log.exception("build %s failed", building.id)
            building.reason, building.status = {"message": "the server has a defect; its log says more"}, "error"

    async def _status(self, owner: str, request: Request) -> Response:
        building = self._find(owner, request)
        offset = request.query_params.get("logsOffset", "0")
        if len(offset) > _DIGITS_MAX or not offset.isdecimal():
            raise WireError("invalid_argument", "`logsOffset` has to be a number")
        entries = building.log[int(offset) : int(offset) + _LOG_PAGE]
        told: Json = {"buildID": building.id, "templateID": building.template, "status": building.status}
        if building.reason is not None:
            told["reason"] = building.reason
        return JSONResponse({**told, "logEntries": entries, "logs": [one["message"] for one in entries]})

    def _find(self, owner: str, request: Request) -> TemplateBuild:
        building = self._builds.get(request.path_params["build"])
        if building is None or building.owner != owner or building.template != request.path_params["template"]:
            raise WireError("not_found", "there is no such build; begin it anew")
        return building

    # -- archives ------------------------------------------------------------------------------------------------------

    async def _upload_link(self, owner: str, request: Request) -> Response:
        digest = request.path_params["digest"]
        present = self._archives.has(owner, digest)
        url = request.url_for("upload", digest=digest).include_query_params(
            owner=owner, signature=self._sign(owner, digest)
        )
        return JSONResponse({"present": present, "url": str(url)}, 201)

    def _sign(self, owner: str, digest: str) -> str:
        return hmac.new(self._keys.secret, f"upload:{owner}:{digest}".encode(), hashlib.sha256).hexdigest()

    async def _upload(self, request: Request) -> Response:
        digest, owner = request.path_params["digest"], request.query_params.get("owner", "")
        given = request.query_params.get("signature", "")
        try:
            if not hmac.compare_digest(given.encode(), self._sign(owner, digest).encode()):
                raise WireError("unauthenticated", "the signature of the upload is wrong")
            async with self._places.take(owner):
                await self._archives.receive(owner, digest, request.stream())
        except WireError as exc:
            return answer(exc)
        return Response(status_code=200)

    # -- templates -----------------------------------------------------------------------------------------------------

    async def _alias(self, owner: str, request: Request) -> Response:
        name, tag = asking.name_and_tag(request.path_params["template"])
        found = await self._templates.find(owner, name)
        if tag is not None and build_of(found, tag) is None:
            raise WireError("not_found", f"template {name!r} has no tag {tag!r}")
        return JSONResponse({"templateID": found.id, "public": False})

    async def _list(self, owner: str, request: Request) -> Response:
        return JSONResponse([_template_json(one) for one in await self._templates.all_of(owner)])

    async def _get(self, owner: str, request: Request) -> Response:
        found = await self._templates.find(owner, request.path_params["template"])
        return JSONResponse({**_template_json(found), "builds": []})

    async def _remove(self, owner: str, request: Request) -> Response:
        ref = request.path_params["template"]
        kept = await self._templates.snapshot(owner, ref)
        if kept is not None:
            await self._sandboxes.remove_snapshot(kept)
            return Response(status_code=204)
        found = await self._templates.find(owner, ref)
        if found.owner != owner:
            raise WireError("permission_denied", f"{ref} is an image of the daemon, and no template of yours")
        await self._templates.remove(found)
        return Response(status_code=204)

    async def _tags(self, owner: str, request: Request) -> Response:
        found = await self._templates.find(owner, request.path_params["template"])
        told = [
            {"tag": tag, "buildID": one["id"], "createdAt": moment(one["built_at"])}
            for tag, one in found.builds.items()
        ]
        return JSONResponse(told)

    async def _tag(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        template, build = await self._templates.build_of(owner, asking.maybe_text(given, "target") or "")
        if template.owner != owner:
            raise WireError("permission_denied", f"{template.name} is an image of the daemon, and no template of yours")
        tags = asking.tags(given)
        await self._templates.tag(template, build, tags)
        return JSONResponse({"buildID": build.id, "tags": tags}, 201)

    async def _untag(self, owner: str, request: Request) -> Response:
        given = await asking.body(request)
        found = await self._templates.find(owner, asking.maybe_text(given, "name") or "")
        await self._templates.untag(found, asking.tags(given))
        return Response(status_code=204)


def _template_json(template: BoxTemplate) -> Json:
    newest = max(map(lambda one: Build(**one), template.builds.values()), key=lambda one: one.built_at, default=None)
    return {
        "templateID": template.id,
        "buildID": newest.id if newest is not None else "",
        "buildStatus": "ready",
        "buildCount": len({one["id"] for one in template.builds.values()}),
        "names": [template.name],
        "aliases": [template.name],
        "public": False,
        "cpuCount": max(1, round((newest and newest.cpus) or 2)),
        "memoryMB": (newest and newest.memory_mb) or 2048,
        "diskSizeMB": 0,
        "envdVersion": ENVD_VERSION,
        "createdAt": moment(template.made_at),
        "updatedAt": moment(newest.built_at if newest is not None else time.time()),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
    }
