"""The recipes of docs/examples/deploy are of one piece: what one part names, another one has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapshotd.config import settings
from tests.kept import installed

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "deploy"
SETTINGS = {field.metadata["variable"] for field in settings()}


def documents(name: str) -> dict[str, Any]:
    """By kind, or the one that has no kind."""
    return {one.get("kind", ""): one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def daemons(name: str) -> list[dict[str, Any]]:
    """The services of a compose file that are daemons."""
    services = documents(name)[""]["services"]
    return [one for one in services.values() if "snapshotd" in str(one.get("command")) and "cap_add" in one]


def pod() -> dict[str, Any]:
    found: dict[str, Any] = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    return found


def test_the_daemon_gets_the_same_rights_everywhere() -> None:
    (one,), fleet = daemons("compose.yaml"), daemons("fleet.yaml")
    (container,) = pod()["containers"]
    assert len(fleet) == 2
    rights = {tuple(each["cap_add"]) for each in (one, *fleet)} | {
        tuple(container["securityContext"]["capabilities"]["add"])
    }
    assert len(rights) == 1
    assert {tuple(each["security_opt"]) for each in (one, *fleet)} == {("seccomp:unconfined", "apparmor:unconfined")}
    assert {container["securityContext"][kind]["type"] for kind in ("seccompProfile", "appArmorProfile")} == {
        "Unconfined"
    }
    assert all("/run/snapshotd:exec,mode=711" in each["tmpfs"] for each in (one, *fleet))


def test_the_manifest_selects_its_own_pods_and_mounts_what_it_has() -> None:
    found = documents("daemonset.yaml")
    assert found.keys() == {"Namespace", "DaemonSet"}
    whole = found["DaemonSet"]
    assert whole["metadata"]["namespace"] == found["Namespace"]["metadata"]["name"]
    wanted = whole["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= whole["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pod()["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod()["volumes"]}
    (port,) = container["ports"]
    assert f"--listen 0.0.0.0:{port['containerPort']}" in container["args"][0]
    assert f":{port['hostPort']}" in container["args"][0]
    assert pod()["terminationGracePeriodSeconds"] == 120


def test_volumes_and_dependencies_of_the_compose_file_exist() -> None:
    whole = documents("fleet.yaml")[""]
    used = {
        volume.split(":")[0]
        for service in whole["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith((".", "/"))
    }
    assert used == whole["volumes"].keys()
    for service in whole["services"].values():
        assert service.get("depends_on", {}).keys() <= whole["services"].keys()
    names = {each["environment"]["SNAPSHOTD_NODE"] for each in daemons("fleet.yaml")}
    assert len(names) == 2
    for each in daemons("fleet.yaml"):
        own = f":-https://{each['environment']['SNAPSHOTD_NODE']}:7676}}"
        assert each["environment"]["SNAPSHOTD_NODE_ADDRESS"].endswith(own), "where nothing else is set"
        assert each["environment"]["SNAPSHOTD_NODE"] in whole["services"]


@pytest.mark.long  # its own parts: above
@pytest.mark.parametrize("version", ["1.30.0", "1.37.0"])
def test_the_manifest_is_one_of_kubernetes(version: str) -> None:
    """By the schema that each version publishes; a field that it does not have is an error."""
    packages = installed("kubernetes_validate", "kubernetes-validate==1.37.0")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, FOLDER / "daemonset.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == 2


@pytest.mark.parametrize("name", ["compose.yaml", "fleet.yaml", "daemonset.yaml", "Dockerfile"])
def test_every_setting_exists(name: str) -> None:
    named = set(re.findall(r"\bSNAPSHOTD_[A-Z_]+", (FOLDER / name).read_text()))
    assert len(SETTINGS) > 20
    assert named <= SETTINGS
