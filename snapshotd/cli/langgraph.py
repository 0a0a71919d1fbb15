"""`import langgraph` and `export langgraph`: threads of LangGraph from one saver into another. No daemon is needed."""

from __future__ import annotations

from collections.abc import Sequence

import click

from snapshotd.cli.text import print_json
from snapshotd.engine.host import integrations
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.terms import number_of

WORD = "langgraph"


def move(source: str, target: str, threads: Sequence[str], *, as_json: bool) -> int:
    """Copy all threads, or these. The errors of `saver_at` and `copy_threads`; Unsupported: LangGraph is not
    installed."""
    with integrations.require("langgraph"):
        from snapshotd.integrations.langgraph import copy_threads
        from snapshotd.integrations.langgraph.addresses import saver_at, words_of

    with saver_at(source, may_create=False) as ours, saver_at(target, may_create=True) as theirs:
        try:
            count = copy_threads(ours, theirs, threads or None)
        except SnapshotdError:
            raise
        except Exception as exc:  # a driver of the one or the other raises its own
            raise UsageError(f"the threads cannot be copied to their end: {words_of(exc)}") from exc
    if as_json:
        print_json({"from": source, "to": target, "checkpoints": count})
    else:
        click.echo(number_of(count, "checkpoint"), err=True)
    return 0
