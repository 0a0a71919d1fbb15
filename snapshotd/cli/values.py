"""Option values with a form of their own, the options that make a sandbox, and completion of ids, names and tags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from snapshotd.api.wire import PROVIDER_URLS, TIMEOUT_MAX_S
from snapshotd.cli.command import connect, join_options
from snapshotd.client.local.sizes import DIGITS_MOST, size_bytes
from snapshotd.client.results import Provider
from snapshotd.config import read_variables
from snapshotd.errors import SnapshotdError
from snapshotd.terms import ALLOW, DEFAULT_TENANT, NAME_PATTERN, SECONDS, SECONDS_MOST, short

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from snapshotd.client.client import Snapshotd
    from snapshotd.client.verbs.base import Progress

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)([smhdw])", re.ASCII | re.IGNORECASE)
_COUNT_MOST = 1 << 53


class TextForm(click.ParamType):  # type: ignore[type-arg]
    """Text of one form, which becomes a value. A default that is no text stays as it is."""

    def parse(self, text: str) -> Any:
        """Return the value. ValueError with the sentence that says what is wrong."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Size(TextForm):
    """`10g`, `500m`: bytes, with a binary unit. `least` and `most` are written the same way."""

    name = "size"

    def __init__(self, least: str = "1", most: str = "8192t") -> None:
        self._least, self._most = least, most

    def parse(self, text: str) -> int:
        count, least, most = (size_bytes(each) for each in (text, self._least, self._most))
        assert least is not None
        assert most is not None
        if count is None or not least <= count <= most:
            raise ValueError(
                f"{text!r} is not a size from {self._least} to {self._most}: "
                "write a whole number with k, m, g or t, such as 512m or 10g"
            )
        return count


class Duration(TextForm):
    """`12h`, `7d`, `1.5h`: seconds. With `zero`, it may be none at all: `0`, `0s`."""

    name = "time"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero
        self._least = "" if zero else " above 0"

    def parse(self, text: str) -> float:
        seconds = self._seconds(text)
        if seconds is None:
            raise ValueError(
                f"{text!r} is not a duration: write a number{self._least} with s, m, h, d or w, such as 12h or 7d"
            )
        return seconds

    def _seconds(self, text: str) -> float | None:
        """Return the duration that a text says; None if it says none, or one that is not allowed."""
        if self._zero and text.strip() == "0":
            return 0.0
        match = _DURATION.fullmatch(text.strip())
        seconds = float(match[1]) * SECONDS[match[2].lower()] if match else 0.0
        return seconds if 0 < seconds <= SECONDS_MOST or (self._zero and match and seconds == 0) else None


class Seconds(Duration):
    """`90`, `1.5`, `10m`: seconds, if it says nothing else."""

    def parse(self, text: str) -> float:
        plain = text.strip()[-1:].isdigit()
        seconds = self._seconds(f"{text.strip()}s" if plain else text)
        if seconds is None:
            raise ValueError(
                f"{text!r} is no time: write seconds{self._least}, or a number with s, m, h, d or w: 90, 1.5, 10m"
            )
        if seconds > TIMEOUT_MAX_S:
            raise ValueError(f"{text!r} is longer than a year")
        return seconds


class NetworkText(TextForm):
    """`none`, `bridge`, or `allow:` and hosts. The daemon says what is wrong with a host."""

    name = "network"

    def parse(self, text: str) -> str:
        if text not in ("none", "bridge") and not text.startswith(ALLOW):
            raise ValueError(
                f"{text!r} is no network: choose none, bridge, or allow: and the hosts that may be reached, such as "
                "allow:pypi.org,*.pypi.org"
            )
        return text


class Count(TextForm):
    """A whole number. click's own range takes `1_000`, and refuses long numbers in Python's words."""

    name = "n"

    def __init__(self, least: int, most: int = _COUNT_MOST, told: str | None = None) -> None:
        """`told`: what errors say of the range."""
        self._least, self._most = least, most
        self._told = told or f"from {least} {'on' if most == _COUNT_MOST else f'to {most:,}'}"

    def parse(self, text: str) -> int:
        digits = text.strip()
        if not (
            digits.isascii()
            and digits.isdigit()
            and len(digits) <= DIGITS_MOST
            and self._least <= int(digits) <= self._most
        ):
            raise ValueError(f"{text!r} is not a whole number {self._told}")
        return int(digits)


class AtOnce(Count):
    """How many run at once: a number, or `auto`, which is 0."""

    name = "parallel"

    def __init__(self) -> None:
        super().__init__(1)

    def parse(self, text: str) -> int:
        return 0 if text == "auto" else super().parse(text)


class Cpus(TextForm):
    """Processors: `2`, `0.5`."""

    name = "cpus"

    def parse(self, text: str) -> float:
        try:
            count = float(text)
        except ValueError:
            count = 0.0
        if not 0.01 <= count <= 4096:  # false for nan, too
            raise ValueError(f"{text!r} is not a number of processors from 0.01 to 4096, such as 2 or 0.5")
        return count


class PortPair(TextForm):
    """`8000`, `8000:9000`, `db`, `db:9000`: a port in the sandbox, or the service that has one, and one of this machine
    (None: any)."""

    name = "port"

    def parse(self, text: str) -> tuple[int | str, int | None]:
        match = re.fullmatch(r"([0-9]{1,5}|[A-Za-z0-9][A-Za-z0-9_.-]{0,63})(?::([0-9]{1,5}))?", text)
        place, local = (match[1], int(match[2] or 0)) if match else ("0", 0)
        number: int | str = int(place) if place.isdecimal() else place
        if not (match and (isinstance(number, str) or 1 <= number <= 65535) and local <= 65535):
            raise ValueError(
                f"{text!r} is not a port: write PORT or PORT:LOCAL with numbers up to 65535, such as 8000 or 8000:9000, or the "
                "name of a service for PORT"
            )
        return number, None if match[2] is None else local


class Variable(TextForm):
    """`K=V`, or `K` for the value it has here."""

    name = "K=V"

    def parse(self, text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not key:
            raise ValueError(f"{text!r} has no name: write K=V, or K for the value it has here")
        if not equals:
            found = read_variables([key])
            if not found:
                raise ValueError(f"{key} is not set here, so it has no value to pass on: write {key}=VALUE")
            value = found[key]
        return key, value


class Secret(Variable):
    """`NAME=VALUE`, or `NAME` for the value it has here. Error messages never show its value."""

    name = "name[=value]"

    def parse(self, text: str) -> tuple[str, str]:
        if text.startswith("="):
            raise ValueError("a secret has no name: write NAME=VALUE, or better NAME alone, for the value it has here")
        return super().parse(text)


class Pair(TextForm):
    """Two words with a sign between them, such as `CALL=FILE`, as a pair. Without the sign, the second is `alone` where
    that is allowed."""

    def __init__(self, form: str, *, alone: str | None = None) -> None:
        self.name = form
        self._alone = alone

    def parse(self, text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if key and not equals and self._alone is not None:
            return key, self._alone
        if not key or not equals:
            raise ValueError(f"{text!r} is not of the form {self.name}")
        return key, value


class Name(TextForm):
    """A name or tag."""

    name = "name"

    def parse(self, text: str) -> str:
        if not NAME_PATTERN.fullmatch(text):
            raise ValueError(
                f"{text!r} cannot be a name: use up to 64 letters, digits and ._- , starting with a letter or digit"
            )
        return text


class ForkName(Name):
    """A name in which `{index}` and `{variant}` may stand."""

    def parse(self, text: str) -> str:
        super().parse(text.replace("{index}", "0").replace("{variant}", "0"))
        return text


# -- completion --------------------------------------------------------------------------------------------------------


def _complete(found: Callable[[Snapshotd, str], list[tuple[str, str | None]]]) -> Callable[..., list[CompletionItem]]:
    """Completes what `found` has for the daemon and the trajectory that was named before: values, and words about them."""

    def complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # only shells need it

        try:
            items = found(connect(ctx, autostart=False), ctx.params.get("trajectory") or "")
        except SnapshotdError:
            return []  # a shell that completes has no place for an error
        return [CompletionItem(value, help=text) for value, text in items if value.startswith(incomplete)]

    return complete


def _trajectories(client: Snapshotd) -> list[tuple[str, str | None]]:
    return [(item.name or short(item.id), item.status) for item in client.trajectories()]


def _snapshots(client: Snapshotd) -> list[tuple[str, str | None]]:
    return [(value, item.tool.name) for item in client.all_snapshots() for value in (*item.tags, short(item.id))]


complete_trajectory = _complete(lambda client, _: _trajectories(client))
complete_snapshot = _complete(lambda client, _: _snapshots(client) + _trajectories(client))
complete_tag = _complete(lambda client, _: [(tag, None) for item in client.all_snapshots() for tag in item.tags])
complete_image = _complete(lambda client, _: [(item.name or short(item.id), None) for item in client.images()])
complete_experiment = _complete(lambda client, _: [(item.name, None) for item in client.experiments()])
complete_approval = _complete(lambda client, _: [(short(item.id), item.name) for item in client.approvals("pending")])
complete_command = _complete(
    lambda client, line: [(item.service or short(item.id), item.status) for item in client.commands(line)]
)
complete_task = _complete(lambda client, line: [(item.name, item.status) for item in client.tasks(line)])


# -- options -----------------------------------------------------------------------------------------------------------


env_option = click.option(
    "-e", "--env", metavar="K=V", type=Variable(), multiple=True, help="Environment variable; K alone passes it on."
)
process_options = join_options(
    click.option("-w", "--cwd", metavar="DIR", help="Working directory in the sandbox."),
    env_option,
    click.option("-u", "--user", metavar="USER[:GROUP]", help="Who runs it in the sandbox, by name or number."),
)
idle_option = click.option(
    "--idle-timeout",
    metavar="TIME",
    type=Seconds(zero=True),
    help="Stop the sandbox, with a last snapshot, after so long without a command (90, 10m; 0: never).",
)
"""--idle-timeout, as the parameter `idle_timeout` in seconds: None when it was not given."""


sandbox_options = join_options(
    click.option(
        "--image",
        metavar="IMAGE",
        default="default",
        show_default=True,
        help="Image to start from, by name or id.",
        shell_complete=complete_image,
    ),
    click.option("--workspace", metavar="DIR", type=click.Path(), help="Folder whose content is copied to /workspace."),
    env_option,
    click.option(
        "--secret",
        "secrets",
        metavar="NAME[=VALUE]",
        type=Secret(),
        multiple=True,
        help="Environment variable whose value is recorded nowhere in plain; NAME alone takes it from here.",
    ),
    click.option(
        "--provider",
        "providers",
        metavar="KIND[=URL]",
        type=Pair("KIND[=URL]", alone=""),
        multiple=True,
        help="Record the model requests of an unmodified agent: openai, anthropic or gemini, at its own address or URL.",
    ),
    click.option(
        "--provider-key",
        "provider_keys",
        metavar="KIND=VARIABLE",
        type=Pair("KIND=VARIABLE"),
        multiple=True,
        help="Where the provider's key is here; else in KIND_API_KEY (OPENAI_API_KEY, ...). It never enters the sandbox.",
    ),
    click.option(
        "--capture-tokens",
        is_flag=True,
        help="Ask an openai provider for token ids and log probabilities, and keep them with the model calls.",
    ),
    click.option(
        "--tenant",
        metavar="T",
        type=Name(),
        default=DEFAULT_TENANT,
        show_default=True,
        help="Tenant of the store that its agents, and the agents of its forks, read and write.",
    ),
    click.option(
        "--network",
        type=NetworkText(),
        metavar="none|bridge|allow:HOST,...",
        help="What the sandbox can reach: nothing, the outside, or some hosts by name (allow:pypi.org,*.pypi.org); --network "
        "alone means bridge.  [default: none]",
    ),
    click.option(
        "--memory",
        type=Size("16m", "1024t"),
        metavar="SIZE",
        help="Most memory, swap included: 512m, 2g.  [default: 2g]",
    ),
    click.option("--cpus", type=Cpus(), metavar="N", help="Most processors, such as 0.5.  [default: 2]"),
    click.option("--pids", type=Count(8, 4 << 20), metavar="N", help="Most processes at once.  [default: 1024]"),
    click.option(
        "--disk",
        type=Size("16m", "1024t"),
        metavar="SIZE",
        help="Most that its files above the image may take: 500m, 20g.  [default: half of the layers' disk]",
    ),
    click.option(
        "--services",
        metavar="FILE",
        type=click.Path(),
        help="TOML file of services that start with the sandbox, and come back in its forks (docs/services.md).",
    ),
    click.option("--name", type=Name(), metavar="NAME", help="Name for the trajectory."),
    click.option(
        "--runtime",
        type=click.Choice(["auto", "runc", "docker"]),
        default="auto",
        show_default=True,
        help="Container driver; auto takes Docker if it answers, else runc.",
    ),
    click.option(
        "--isolation",
        type=click.Choice(["none"]),
        help="none: a plain folder in place of a container, for machines that give nothing; commands run as you, with this "
        "machine's programs, files and network.",
    ),
)
"""The options that make a sandbox; `sandbox_keywords` turns them into the client's."""


def sandbox_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Return the client's keywords for the options. UsageError: the providers make no sense."""
    apart = ("secrets", "providers", "provider_keys", "isolation")
    rest = {key: value for key, value in options.items() if key not in apart}
    if options["isolation"] is not None:
        if options["runtime"] != "auto":
            raise click.UsageError("--runtime is for containers, and --isolation none has none; leave one of them out")
        rest["runtime"] = options["isolation"]
    providers = _providers(options["providers"], dict(options["provider_keys"]))
    if options["capture_tokens"] and not any(provider.kind == "openai" for provider in providers):
        raise click.UsageError(
            "--capture-tokens needs --provider openai: no other API has token ids or log probabilities; add it, or leave the "
            "option out"
        )
    return {**rest, "env": dict(options["env"]), "secrets": dict(options["secrets"]), "providers": providers}


def make_image(client: Snapshotd, keywords: dict[str, Any], progress: Progress | None) -> None:
    """Build or import the image that a sandbox with these keywords needs, where it is missing."""
    if keywords["runtime"] != "none":
        limits = {name: keywords[name] for name in ("memory", "cpus", "pids", "disk") if name in keywords}
        client.ensure_image(keywords["image"], progress=progress, **limits)


def _providers(wanted: Sequence[tuple[str, str]], keys: dict[str, str]) -> list[Provider]:
    for kind in [kind for kind, _ in wanted] + list(keys):
        if kind not in PROVIDER_URLS:
            raise click.UsageError(f"{kind!r} is no kind of provider; write {' or '.join(PROVIDER_URLS)}")
    unused = next((kind for kind in keys if kind not in dict(wanted)), None)
    if unused is not None:
        raise click.UsageError(f"a key was given for {unused}, but no --provider {unused}; add that")
    found = []
    for kind, url in wanted:
        variable = keys.get(kind, f"{kind.upper()}_API_KEY")
        key = read_variables([variable]).get(variable) or None
        if kind in keys and key is None:
            raise click.UsageError(
                f"there is no key for {kind}: {variable} is not set here; set it, or name another variable"
            )
        if key is None and not url:
            raise click.UsageError(
                f"there is no key for {kind}: {variable} is not set here, and {PROVIDER_URLS[kind]} answers nobody without "
                "one; set it, or name another variable"
            )
        if key is None:
            click.echo(f"there is no key for {kind}: {variable} is not set here; it is asked without one", err=True)
        found.append(Provider(kind, url or None, key))
    return found


def check_file(path: str, what: str) -> None:
    """Check that a file of this machine can be read. UsageError: it is missing, no file, or unreadable."""
    where = Path(path)
    if where.is_dir():
        raise click.UsageError(f"the {what} {path} is a directory, not a file")
    try:
        where.open("rb").close()
    except OSError as exc:
        raise click.UsageError(f"the {what} {path} cannot be read: {exc.strerror}") from exc


def check_folder(path: str, what: str) -> None:
    """Check that a folder of this machine can be read. UsageError: it is missing, no folder, or unreadable."""
    try:
        os.scandir(path).close()
    except OSError as exc:
        raise click.UsageError(f"the {what} {path} cannot be read: {exc.strerror}") from exc
