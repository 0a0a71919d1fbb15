"""Fixtures of the tests through the client. They stand in `process.py`, where both clients can be put in."""

from tests.unit.daemon.process import box, client

__all__ = ["box", "client"]
