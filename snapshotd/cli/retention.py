"""The options that are the rules of a retention policy, and how a policy reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from snapshotd.cli.command import join_options
from snapshotd.cli.text import size
from snapshotd.cli.values import Count, Duration, Size
from snapshotd.client.results import Policy
from snapshotd.terms import duration

retention_options = join_options(
    click.option("--keep-last", metavar="N", type=Count(0), help="Keep the newest N of each trajectory."),
    click.option("--keep-within", metavar="TIME", type=Duration(), help="Keep those younger than this: 12h, 7d, 4w."),
    click.option("--keep-every", metavar="K", type=Count(1), help="Keep milestones: every K-th of each trajectory."),
    click.option(
        "--keep-failed",
        metavar="N",
        type=Count(1),
        help="Keep the newest N whose tool call failed, of each trajectory.",
    ),
    click.option(
        "--max-size",
        metavar="SIZE",
        type=Size(),
        help="Of what the rules keep, drop the oldest until the repository fits: 10g.",
    ),
)
"""The rules; `policy_of` makes a policy of them."""


def policy_of(options: dict[str, Any]) -> Policy | None:
    """The policy that the options are; None when none was given. Takes them out of `options`."""
    policy = Policy(
        keep_last=options.pop("keep_last"),
        keep_within_s=options.pop("keep_within"),
        keep_every=options.pop("keep_every"),
        keep_failed=options.pop("keep_failed"),
        max_bytes=options.pop("max_size"),
    )
    return None if policy == Policy() else policy


def rules(policy: Policy) -> list[tuple[str, str]]:
    """The rules of a policy as options and their values."""
    given: tuple[tuple[str, Any, Callable[[Any], str]], ...] = (
        ("--keep-last", policy.keep_last, str),
        ("--keep-within", policy.keep_within_s, duration),
        ("--keep-every", policy.keep_every, str),
        ("--keep-failed", policy.keep_failed, str),
        ("--max-size", policy.max_bytes, size),
    )
    return [(option, text(value)) for option, value, text in given if value is not None]
