"""Templates, by their names and tags. Where nobody has built one of that name, an image of the daemon is one."""

from __future__ import annotations

import dataclasses
import time
from uuid import uuid4

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotFound
from snapshotd.integrations.e2b.control.asking import name_and_tag
from snapshotd.integrations.e2b.control.building import begin_sandbox
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.locks import NamedLocks
from snapshotd.integrations.e2b.people import People
from snapshotd.integrations.e2b.records import BoxTemplate, Build, KeptSnapshot, Records, build_of

DEFAULT_TAG = "default"
BASE = ("base", "e2bdev/base", "e2bdev/base:latest")
"""Names of E2B's own base image. Here it is the daemon's, or the one that the server was told."""
EVERYBODY = ""
"""The owner of templates that are images."""


class TemplateCatalog:
    """`base`: the image that `base` means."""

    def __init__(self, client: AsyncSnapshotd, records: Records, people: People, base: str) -> None:
        self._client, self._records, self._people, self._base = client, records, people, base
        self._lock = NamedLocks()

    def image(self, name: str) -> str:
        """The name of an image, as the daemon knows it."""
        return self._base if name in BASE else name

    async def find(self, owner: str, ref: str) -> BoxTemplate:
        """The template of this id, or of this name without a tag. WireError: there is none."""
        found = await self.look_up(owner, ref)
        if found is None:
            raise WireError("not_found", f"template {ref!r} not found; build it, or name an image that the daemon has")
        return found

    async def look_up(self, owner: str, ref: str) -> BoxTemplate | None:
        found = await self._records.find(BoxTemplate, ref) if "/" not in ref else None
        if found is not None and (found.owner == owner or (found.owner == EVERYBODY and found.tenant == owner)):
            return found
        async for one in self._records.all_of(BoxTemplate, owner=owner, name=ref):
            return one
        return None

    async def build_of(self, owner: str, ref: str) -> tuple[BoxTemplate, Build]:
        """The build that NAME or NAME:TAG means; of an image, if there is no template of that name. WireError: there is
        none."""
        name, tag = name_and_tag(ref)
        found = await self.look_up(owner, name)
        if found is None:
            return await self._of_image(owner, ref)
        build = build_of(found, tag or DEFAULT_TAG)
        if build is None:
            raise WireError("not_found", f"template {name!r} has no build with the tag {tag or DEFAULT_TAG!r}")
        return found, build

    async def snapshot(self, owner: str, ref: str) -> KeptSnapshot | None:
        """A snapshot that a client has made, by id or name."""
        found = await self._records.find(KeptSnapshot, ref) if "/" not in ref else None
        if found is not None and found.owner == owner:
            return found
        async for one in self._records.all_of(KeptSnapshot, owner=owner):
            if ref in one.names or f"{ref}:{DEFAULT_TAG}" in one.names:
                return one
        return None

    async def all_of(self, owner: str) -> list[BoxTemplate]:
        return [one async for one in self._records.all_of(BoxTemplate, owner=owner)]

    async def put(self, owner: str, template_id: str, name: str, tags: list[str], build: Build) -> None:
        """Give a template a build, under these tags. The template is made if there is none."""
        async with self._lock(template_id):
            found = await self._records.find(BoxTemplate, template_id)
            template = found or BoxTemplate(template_id, owner, name, time.time(), tenant=owner)
            before = {tag: template.builds.get(tag) for tag in tags}
            template.builds |= {tag: dataclasses.asdict(build) for tag in tags}
            await self._records.put(template)
            await self._drop_unused(template, [one["trajectory"] for one in before.values() if one is not None])

    async def tag(self, template: BoxTemplate, build: Build, tags: list[str]) -> None:
        async with self._lock(template.id):
            template.builds |= {tag: dataclasses.asdict(build) for tag in tags}
            await self._records.put(template)

    async def untag(self, template: BoxTemplate, tags: list[str]) -> None:
        """Take tags from a template. WireError: it lacks one of them."""
        async with self._lock(template.id):
            if missing := [tag for tag in tags if tag not in template.builds]:
                raise WireError("not_found", f"template {template.name!r} has no tag {missing[0]!r}")
            dropped = [template.builds.pop(tag)["trajectory"] for tag in tags]
            await self._records.put(template)
            await self._drop_unused(template, dropped)

    async def remove(self, template: BoxTemplate) -> None:
        """Remove a template. Sandboxes that were made of it stay."""
        dropped = [one["trajectory"] for one in template.builds.values()]
        template.builds = {}
        await self._records.drop(template)
        await self._drop_unused(template, dropped)

    async def _drop_unused(self, template: BoxTemplate, trajectories: list[str]) -> None:
        kept = {one["trajectory"] for one in template.builds.values()}
        for trajectory in set(trajectories) - kept:
            try:
                await self._client.remove(trajectory, force=True)
            except (Conflict, NotFound):
                pass  # sandboxes were made of it, or a person has removed it

    async def _of_image(self, tenant: str, name: str) -> tuple[BoxTemplate, Build]:
        """The template that an image of the daemon is for a tenant. It is made when it is first asked for, and when the image
        has changed."""
        wanted = self.image(name)
        async with self._lock(f"image {wanted} of {tenant}"):
            images = {one.name: one.id for one in await self._client.images()}
            if wanted not in images and wanted == self._base:
                made = await self._client.ensure_image(wanted)
                images[wanted] = made.id
            if wanted not in images:
                raise WireError(
                    "not_found", f"template {name!r} not found; build it, or name an image that the daemon has"
                )
            async for template in self._records.all_of(BoxTemplate, owner=EVERYBODY, name=wanted):
                if template.tenant != tenant:
                    continue
                build = build_of(template, DEFAULT_TAG)
                if build is not None and build.image == images[wanted] and await self._is_there(build):
                    return template, build
                await self.remove(template)
            trajectory, snapshot = await begin_sandbox(self._client, self._people, wanted, "none", tenant)
            await self._client.stop(trajectory)
            build = Build(str(uuid4()), snapshot, trajectory, time.time(), image=images[wanted])
            builds = {DEFAULT_TAG: dataclasses.asdict(build)}
            template = BoxTemplate(uuid4().hex[:20], EVERYBODY, wanted, time.time(), builds, tenant)
            await self._records.put(template)
            return template, build

    async def _is_there(self, build: Build) -> bool:
        try:
            await self._client.snapshot(build.snapshot)
        except NotFound:
            return False
        return True
