"""`snapshotd login`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from snapshotd.cli.command import ask, declare, is_terminal, refuse
from snapshotd.client.client import Snapshotd
from snapshotd.errors import DaemonUnavailable, NotPermitted

_TOKEN_MAX = 1024


@declare(
    "login",
    examples=[
        "snapshotd login https://build.example.org:7676",
        "snapshotd login https://build.example.org:7676 --pin sha256:9f86d0... < token",
        "SNAPSHOTD_HOST=https://build.example.org:7676 snapshotd ls",
    ],
)
@click.option(
    "--pin", metavar="FINGERPRINT", help="Fingerprint of the daemon's certificate, which it prints when it starts."
)
@click.option(
    "--ca",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Who may have signed it, in PEM.",
)
@click.argument("host", metavar="https://HOST:PORT")
def command(ctx: click.Context, host: str, pin: str | None, ca: Path | None) -> None:
    """Keep the token of a daemon on another machine.

    Reads the token from standard input, or asks for it at a terminal, and tries it. It is kept for your user alone, in
    ~/.config/snapshotd/hosts.json; commands and clients with SNAPSHOTD_HOST use it. A certificate that nobody known has
    signed is known by its fingerprint from then on: give it, or compare it when you are asked.
    """
    from snapshotd.client.remote.logins import Login, find_login, save_login
    from snapshotd.client.remote.tls import TlsWay, fingerprint_at

    if pin is not None and ca is not None:
        refuse("--pin knows the certificate itself, and --ca who signed it; give one of them")
    signed_by = None if ca is None else str(ca.absolute())
    place = TlsWay(host, "-", pin or "sha256:" + "0" * 64).place
    if pin is None and ca is None and place.startswith("https://") and not _is_trusted(place):
        try:
            shown = fingerprint_at(place)
        except OSError as exc:
            raise DaemonUnavailable(
                f"no daemon answers at {place} ({exc.strerror or exc}); name another address"
            ) from exc
        if not is_terminal():
            raise NotPermitted(
                f"nobody known has signed the certificate of {place}; give its fingerprint, which the daemon prints when it "
                "starts, with --pin"
            )
        click.echo(f"The certificate of {place} has the fingerprint\n  {shown}", err=True)
        ask("Is it the one that the daemon prints when it starts?")
        pin = shown
    elif pin is None and signed_by is None:
        known = find_login(place)
        pin, signed_by = known.pin, known.ca
    token = _token()
    found = Snapshotd(host=place, token=token, pin=pin, ca=signed_by).version()
    save_login(place, Login(token, pin, signed_by))
    click.echo(
        f"snapshotd: {place} (version {found.version}) is known now; use it with SNAPSHOTD_HOST={place}", err=True
    )


def _is_trusted(place: str) -> bool:
    """True if the system knows who signed the certificate. DaemonUnavailable: nobody answers."""
    try:
        Snapshotd(host=place, token="-").version()
    except NotPermitted as exc:
        return "certificate" not in exc.message
    return True


def _token() -> str:
    if is_terminal():
        token: str = click.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.read(_TOKEN_MAX) if sys.stdin is not None else ""
    token = token.strip()
    if not token:
        refuse("there is no token on standard input; `snapshotd token create` on the daemon's machine prints one")
    return token
