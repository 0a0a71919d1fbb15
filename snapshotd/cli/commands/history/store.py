"""`snapshotd store get|put|ls|rm|history`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import connect, declare, declare_group, json_option, refuse
from snapshotd.cli.documents import as_page, file_bytes, json_value, short_json
from snapshotd.cli.text import print_answer, print_json, print_list, printable
from snapshotd.cli.values import Count, Duration, Pair
from snapshotd.client.results import ValueInfo
from snapshotd.terms import DEFAULT_TENANT

_TENANT = click.option("--tenant", metavar="T", default=DEFAULT_TENANT, show_default=True, help="Whose values.")
_IF_VERSION = click.option(
    "--if-version",
    metavar="N",
    type=Count(0),
    help="Only if this is the newest version (0: there is none); else refuse.",
)


@declare_group("store")
def command() -> None:
    """Read and write the key-value store across trajectories.

    It outlives runs, and agents reach it too. A NAMESPACE has parts separated by slashes, a value is any JSON value,
    and every change is a new version.
    """


@declare(
    "get",
    group=command,
    examples=["snapshotd store get team/plans release", "snapshotd store get --version 3 team/plans release"],
)
@click.option("--version", metavar="N", type=Count(1), help="An older version.")
@_TENANT
@json_option
@click.argument("namespace")
@click.argument("key")
def get(ctx: click.Context, namespace: str, key: str, version: int | None, tenant: str, as_json: bool) -> None:
    """Print a value.

    As JSON. With --json: {tenant,namespace,key,version,value,created_at,expires_at,is_deleted}.
    """
    found = connect(ctx).get_value(namespace, key, tenant=tenant, version=version)
    print_answer(found, as_page(found.value), as_json=as_json)


@declare(
    "put",
    group=command,
    examples=[
        'snapshotd store put team/plans release \'{"date": "friday"}\'',
        "snapshotd store put --text notes today 'all well'",
        "snapshotd store put --ttl 2h --if-version 0 locks deploy '\"ann\"'",
    ],
)
@click.option("--text", is_flag=True, help="The value is text, not JSON.")
@click.option("--ttl", metavar="TIME", type=Duration(), help="It is gone after this time: 30m, 2h, 7d.")
@_IF_VERSION
@_TENANT
@json_option
@click.argument("namespace")
@click.argument("key")
@click.argument("value", metavar="JSON|-")
def put(
    ctx: click.Context,
    namespace: str,
    key: str,
    value: str,
    text: bool,
    ttl: float | None,
    if_version: int | None,
    tenant: str,
    as_json: bool,
) -> None:
    """Write a value.

    - takes it from standard input. Prints the new version's number. With --json: as `store get --json`.
    """
    given = file_bytes("-", "the value").decode(errors="replace") if value == "-" else value
    content: Any = given if text else json_value(given, "the value")
    stored = connect(ctx).put_value(namespace, key, content, tenant=tenant, ttl_s=ttl, expected_version=if_version)
    print_answer(stored, str(stored.version), as_json=as_json)


@declare(
    "ls",
    group=command,
    examples=["snapshotd store ls team", "snapshotd store ls team/plans --prefix rel --where owner.name='\"ann\"'"],
)
@click.option("--prefix", metavar="TEXT", default="", help="Only keys that begin so.")
@click.option(
    "--where",
    metavar="FIELD=JSON",
    type=Pair("FIELD=JSON"),
    multiple=True,
    help="Only values whose field (a dotted path) is this: text in quotation marks, a number, true, false, null.",
)
@click.option("--limit", metavar="N", type=Count(1), default="100", show_default=True, help="At most so many.")
@click.option("--after", metavar="KEY", default="", help="Only keys behind this one: the next page.")
@_TENANT
@json_option
@click.argument("namespace")
def ls(
    ctx: click.Context,
    namespace: str,
    prefix: str,
    where: tuple[tuple[str, str], ...],
    limit: int,
    after: str,
    tenant: str,
    as_json: bool,
) -> None:
    """List keys and their values.

    Lists a namespace and the ones below it, in the order of the keys. With --json: an array as of `store get --json`.
    """
    fields = {field: json_value(text, f"the value for {field}") for field, text in where}
    odd = next((field for field, value in fields.items() if isinstance(value, dict | list)), None)
    if odd is not None:
        refuse(f"{odd} is compared with one value, not with an array or object; name a field inside of it")
    _report(
        connect(ctx).search_values(namespace, tenant=tenant, prefix=prefix, where=fields, limit=limit, after=after),
        as_json,
    )


@declare("rm", group=command, examples=["snapshotd store rm team/plans release"])
@_IF_VERSION
@_TENANT
@json_option
@click.argument("namespace")
@click.argument("key")
def rm(ctx: click.Context, namespace: str, key: str, if_version: int | None, tenant: str, as_json: bool) -> None:
    """Remove a value.

    Recorded as a version: `store history` still has the older ones. With --json: {"removed":[key]}.
    """
    connect(ctx).delete_value(namespace, key, tenant=tenant, expected_version=if_version)
    if as_json:
        print_json({"removed": [key]})


@declare("history", group=command, examples=["snapshotd store history team/plans release"])
@_TENANT
@json_option
@click.argument("namespace")
@click.argument("key")
def history(ctx: click.Context, namespace: str, key: str, tenant: str, as_json: bool) -> None:
    """List the versions of a value.

    Newest first, as far as they are kept. With --json: an array as of `store get --json`.
    """
    _report(connect(ctx).value_history(namespace, key, tenant=tenant), as_json)


def _report(found: list[ValueInfo], as_json: bool) -> None:
    print_list(
        found,
        ("NAMESPACE", "KEY", "VERSION", "CREATED", "EXPIRES", "VALUE"),
        lambda item: (
            printable(item.namespace),
            printable(item.key),
            str(item.version),
            item.created_at,
            item.expires_at or "-",
            "deleted" if item.is_deleted else short_json(item.value),
        ),
        as_json=as_json,
        right=(2,),
    )
