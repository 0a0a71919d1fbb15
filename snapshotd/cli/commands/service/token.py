"""`snapshotd token create|list|revoke`."""

from __future__ import annotations

from typing import get_args

import click

from snapshotd.api.access import TokenInfo
from snapshotd.api.operation import Scope
from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.text import print_answer, print_json, print_list
from snapshotd.cli.values import Duration, Name
from snapshotd.client.client import Snapshotd

_SCOPES: tuple[Scope, ...] = get_args(Scope)


@declare_group("token")
def command() -> None:
    """Make, list and revoke tokens for callers from other machines.

    The daemon keeps no token, only a digest of each.
    """


@declare(
    "create",
    group=command,
    examples=[
        "snapshotd token create laptop --scope run --scope approve",
        "snapshotd token create ci --scope run --tenant acme --expires 90d",
        "snapshotd token create owner --scope admin",
    ],
)
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(_SCOPES),
    multiple=True,
    default=("read",),
    show_default=True,
    help="What it opens: run and approve open what read does, too; admin everything, of all tenants. Several may be given.",
)
@click.option("--tenant", metavar="T", type=Name(), help="Whose things alone its caller sees.  [default: default]")
@click.option("--expires", metavar="TIME", type=Duration(), help="Time until it opens nothing any more: 12h, 90d.")
@json_option
@click.argument("name", type=Name())
def create(
    ctx: click.Context, name: str, scopes: tuple[Scope, ...], tenant: str | None, expires: float | None, as_json: bool
) -> None:
    """Make a token.

    Prints its text, which is shown this once. With --json:
    {"token","info":{token_id,name,scopes,tenant,created_at,expires_at,has_expired}}.
    """
    made = connect(ctx).create_token(name, scopes=scopes, tenant=tenant, expires_s=expires)
    print_answer({"token": made.token, "info": made.info}, made.token, as_json=as_json)
    if not as_json:
        click.echo("snapshotd: it is shown this once; `snapshotd login` on the other machine takes it", err=True)


@declare("list", group=command, examples=["snapshotd token list"])
@json_option
def list_(ctx: click.Context, as_json: bool) -> None:
    """List tokens.

    With --json: an array of {"token_id","name","scopes","tenant","created_at","expires_at","has_expired"}.
    """
    header = ("NAME", "ID", "SCOPES", "TENANT", "CREATED", "EXPIRES")
    print_list(connect(ctx).tokens(), header, _row, as_json=as_json)


@declare("revoke", group=command, examples=["snapshotd token revoke laptop"])
@json_option
@click.argument("tokens", metavar="TOKEN...", nargs=-1, required=True)
def revoke(ctx: click.Context, tokens: tuple[str, ...], as_json: bool) -> None:
    """Revoke tokens, by their names or ids.

    They open nothing any more, and what is open with them is cut. With --json: {"removed":[token]}.
    """
    client: Snapshotd = connect(ctx)
    for one in tokens:
        client.revoke_token(one)
    if as_json:
        print_json({"removed": list(tokens)})


def _row(one: TokenInfo) -> tuple[str, ...]:
    expires = "never" if one.expires_at is None else one.expires_at[:16] + ("  expired" if one.has_expired else "")
    return one.name, one.token_id, ",".join(one.scopes), one.tenant or "(all)", one.created_at[:16], expires
