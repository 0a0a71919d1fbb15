"""A private S3-compatible service, as a process of its own that ends with the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import pytest

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


@contextmanager
def running(host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a service at an address of this machine, with credentials for it in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        command = [sys.executable, "-c", _CODE, host]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            assert server.stdout is not None
            try:
                yield f"http://{host}:{int(server.stdout.readline())}"
            finally:
                server.kill()


def make_bucket(endpoint: str) -> str:
    """A new, empty bucket's name."""
    name = f"bucket-{os.urandom(6).hex()}"
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=name)
    client.close()
    return name
