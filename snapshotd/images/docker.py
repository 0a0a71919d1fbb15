"""Take an image out of a Docker engine: as a file system, through a container that is created, exported, removed and
never started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import docker
import requests
from docker.errors import DockerException, ImageNotFound

from snapshotd.errors import NotFound, SandboxFailed, Unsupported
from snapshotd.formats.ingest import IngestReport, ingest_tar
from snapshotd.images.base import innermost_reason
from snapshotd.images.chunks import Chunks
from snapshotd.images.config import ImageConfig, check_platform, parse_config
from snapshotd.kernel import files

_TIMEOUT_S = 300
"""Before an engine sends the first byte of an export it mounts the image, which can take long on slow disks."""
_CHUNK_BYTES = 1 << 20
LABEL = "snapshotd.image-import"
"""Label on the containers that are made here: it explains them to a person who finds one after a crash."""


class DockerImages:
    """The images of the engine that the environment (DOCKER_HOST) or the default socket leads to."""

    @contextmanager
    def _client(self) -> Iterator[docker.DockerClient]:
        try:
            client = docker.from_env(timeout=_TIMEOUT_S)
        except DockerException as exc:
            message = (
                f"the Docker engine cannot be reached ({innermost_reason(exc)}); start it, or import from a file or build a "
                "recipe instead"
            )
            raise Unsupported(message) from exc
        try:
            yield client
        except ImageNotFound as exc:
            raise NotFound(f"the Docker image vanished: {exc.explanation}") from exc
        except (DockerException, requests.RequestException) as exc:
            raise SandboxFailed(f"the Docker engine failed while an image was taken from it: {exc}") from exc
        finally:
            client.close()

    def inspect(self, name: str) -> ImageConfig:
        """The configuration of the image that a name stands for now. NotFound (with what to type), Unsupported (no
        engine), UsageError (other machine's)."""
        with self._client() as client:
            try:
                attributes = client.images.get(name).attrs
            except ImageNotFound as exc:
                raise NotFound(f"the Docker engine has no image {name}; get it with `docker pull {name}`") from exc
        check_platform(attributes.get("Os"), attributes.get("Architecture"), f"the Docker image {name}")
        return parse_config("image:" + attributes["Id"], attributes.get("Config"), f"the Docker image {name}")

    def extract(self, config: ImageConfig, target_fd: int, progress: Callable[[str], None]) -> IngestReport:
        """Put the image's files into the empty directory `target_fd`. Nothing stays in the engine."""
        with self._client() as client:
            image = config.source_id.removeprefix("image:")
            made = client.api.create_container(
                image, command=["/never-started"], labels={LABEL: image}, network_disabled=True
            )
            try:
                progress("exporting from Docker")
                report = ingest_tar(Chunks(client.api.export(made["Id"], _CHUNK_BYTES)), target_fd, oci_whiteouts=False)
            finally:
                client.api.remove_container(made["Id"], v=True, force=True)
        files.remove_tree(target_fd, b".dockerenv")  # made by the engine for the container, not part of the image
        return report
