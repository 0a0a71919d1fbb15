"""The pod of docs/examples/deploy/daemonset.yaml, started by podman: it joins a fleet, and its sandboxes are stored in the bucket.

Podman is no Kubernetes: fields of the node, and a secret as a volume, are unknown to Debian's, and stand here with their values."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import BotoCoreError, ClientError

from snapshotd.repo.key import load_key
from tests import trimmed_runc
from tests.capabilities import require
from tests.e2e import deployment
from tests.e2e.support import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # the same image and rights over Docker: test_deployed.py
MANIFEST = Path(__file__).resolve().parents[2] / "docs" / "examples" / "deploy" / "daemonset.yaml"


class Podman:
    """Podman with a storage and a network of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, f"snapshotd-test-{os.getpid()}"
        self.command = (
            *("podman", "--root", str(folder / "root"), "--runroot", str(folder / "run")),
            *("--cgroup-manager", "cgroupfs", "--network-config-dir", str(folder / "networks")),
            *("--runtime", trimmed_runc.__file__),
        )
        (folder / "networks").mkdir()
        self("network", "create", self.network)

    def __call__(self, *words: str, code: int | None = 0) -> str:
        done = subprocess.run(
            [*self.command, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, check=False
        )
        assert code is None or done.returncode == code, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def serve(self, name: str, **environment: str) -> str:
        """Start one of the services. Returns its address."""
        words = [word for item in environment.items() for word in ("--env", "=".join(item))]
        self("run", "--detach", "--name", name, "--network", self.network, *words, deployment.SERVICES_IMAGE)
        return self("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name).strip()

    def close(self) -> None:
        self("pod", "rm", "--all", "--force", "--time", "5", code=None)
        self("rm", "--all", "--force", "--time", "1", code=None)
        self("network", "rm", self.network)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for place in reversed([one for one in mounts if one.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", place], check=True, timeout=60)


@pytest.fixture
def podman() -> Iterator[Podman]:
    require("podman")
    folder = Path(tempfile.mkdtemp(prefix="snapshotd-podman-", dir="/var/tmp"))
    try:
        with closing(Podman(folder)) as made:
            deployment.import_base(made.command)
            (folder / "services").mkdir()
            deployment.make_services_image(folder / "services", made.command)
            yield made
    finally:
        shutil.rmtree(folder)


def pod_of(podman: Podman, image: str) -> dict[str, Any]:
    """The manifest's pod, with what podman does not know in other words, and folders of the test's own."""
    (daemon_set,) = [one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "DaemonSet"]
    template = daemon_set["spec"]["template"]
    (container,) = template["spec"]["containers"]
    container["image"] = image
    container["ports"][0].pop("hostPort")
    for each in container["env"]:
        if field := each.pop("valueFrom", None):
            known = {"spec.nodeName": "machine-1.example.com", "status.hostIP": "192.0.2.1"}
            each["value"] = known[field["fieldRef"]["fieldPath"]]
    (folder := podman.folder / "key").mkdir()
    load_key(folder)
    for volume in template["spec"]["volumes"]:
        if volume.pop("secret", None):
            volume["hostPath"] = {"path": str(folder), "type": "Directory"}
        elif volume.get("hostPath", {}).get("type") == "DirectoryOrCreate":
            volume["hostPath"]["path"] = str(podman.folder / volume["name"])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": template["spec"],
        "metadata": {"name": "node", **template["metadata"]},
    }


def test_a_pod_of_the_manifest_is_a_node_of_a_fleet(podman: Podman) -> None:
    project = deployment.stage(podman.folder / "project", "fleet,s3").parents[3]
    image = "registry.example/snapshotd-fleet:test"
    build = ("--build-arg", f"BASE={deployment.BASE_IMAGE}", "--build-arg", "EXTRAS=fleet,s3")
    podman(
        "build",
        "--network",
        "host",
        *build,
        "--file",
        str(project / "docs/examples/deploy/Dockerfile"),
        "--tag",
        image,
        str(project),
    )
    password = secrets.token_hex(16)
    database = podman.serve("database", POSTGRES_USER="snapshotd", POSTGRES_DB="snapshotd", POSTGRES_PASSWORD=password)
    bucket = f"http://{podman.serve('bucket', MINIO_ROOT_USER='snapshotd', MINIO_ROOT_PASSWORD=password)}:9000"
    s3 = boto3.client(
        "s3",
        endpoint_url=bucket,
        region_name="us-east-1",
        aws_access_key_id="snapshotd",
        aws_secret_access_key=password,
    )

    def made() -> bool:
        with contextlib.suppress(ClientError, BotoCoreError):
            s3.create_bucket(Bucket="snapshotd")
            return True
        return False

    wait_until(made, "the bucket's service answers", 120, pause_s=0.5)
    settings = {
        "SNAPSHOTD_FLEET": f"postgresql://snapshotd@{database}/snapshotd",
        "PGPASSWORD": password,
        "SNAPSHOTD_STORE": f"s3://snapshotd?endpoint={bucket}&region=us-east-1",
        "AWS_ACCESS_KEY_ID": "snapshotd",
        "AWS_SECRET_ACCESS_KEY": password,
    }
    secret = podman.folder / "secret.json"
    secret.write_text(json.dumps({name: base64.b64encode(value.encode()).decode() for name, value in settings.items()}))
    podman("secret", "create", "snapshotd", str(secret))
    pod = podman.folder / "pod.yaml"
    pod.write_text(yaml.safe_dump(pod_of(podman, image)))

    podman("kube", "play", "--network", podman.network, str(pod))

    def inside(*words: str, code: int | None = 0) -> str:
        return podman("exec", "node-daemon", "snapshotd", *words, code=code)

    def answers() -> bool:
        return bool(inside("daemon", "--status", code=None))

    wait_until(answers, "the node's daemon answers, which is after it has its lease", 120, pause_s=0.5)
    (node,) = json.loads(inside("fleet", "status", "--json", "--database", settings["SNAPSHOTD_FLEET"]))
    assert (node["node"], node["state"]) == ("machine-1", "leased")
    inside("create", "--image", "minimal", "--name", "box")
    assert "hello" in inside("exec", "box", "--", "sh", "-c", "echo hello > file; cat file")
    inside("wait", "--until", "published", "box")
    assert [one["published"] for one in json.loads(inside("log", "--json", "box"))] == [True, True]
    assert "Contents" in s3.list_objects_v2(Bucket="snapshotd", Prefix="nodes/machine-1/packs/")
    s3.close()
