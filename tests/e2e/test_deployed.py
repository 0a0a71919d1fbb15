"""The daemon as the container of docs/examples/deploy, driven from outside as its users do; killed, started again, taken down."""

from __future__ import annotations


