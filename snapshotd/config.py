"""Settings of the daemon, the command line and the client: name, default, range and meaning of each in one place.

This module alone reads the environment (tests/unit/test_config.py has the exceptions, with reasons). A process reads
its settings once, where it starts, and passes them down. docs/configuration.md is the user's list.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from snapshotd.errors import UsageError

CLIENT = ("state_dir", "socket", "host", "token", "tls_pin", "tls_ca", "reconnect_s")
"""The settings that the client and the command line read. The daemon reads all."""
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")
_BYTES_MOST = 1 << 60
_BYTES_LEAST = 1 << 20


def _setting(variable: str, default: Any, shown: str, meaning: str, parse: Callable[[str], Any], allowed: str) -> Any:
    """A field that `variable` sets. `shown`: the default in words; `parse` raises ValueError for what `allowed` does
    not name."""
    text = {"variable": variable, "shown": shown, "meaning": meaning, "parse": parse, "allowed": allowed}
    return field(default=default, metadata=text)


def _text(variable: str, default: str, shown: str, meaning: str, allowed: str) -> Any:
    return _setting(variable, default, shown, meaning, str, allowed)


def _count(variable: str, default: int | None, shown: str, meaning: str, least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise ValueError
        return int(text)

    return _setting(variable, default, shown, meaning, parse, f"a whole number from {least} to {most}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


def _some_seconds(text: str) -> float:
    if _seconds(text) == 0:
        raise ValueError
    return _seconds(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


def _node(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError
    return text


def _https(text: str) -> str:
    if not re.fullmatch(r"https?://[^/\s@]+/?", text):
        raise ValueError
    return text.rstrip("/")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UserPlaces:
    """The places of a user's daemons that no setting names: root's, or any other user's own. Chosen once, by `places`."""

    state_dir: Path
    """The state directory of the daemon that commands use by default."""
    sockets: Path
    """Directory of the sockets that commands and agents' hooks connect to."""
    run_root: Path
    """Directory in which every daemon has one for what lasts until the machine boots. Each user may go through it, since
    the user of a container may be any."""
    share_root: Path
    """Directory in which every daemon has one that its sandboxes see read-only. Not where `noexec` is usual."""
    run_source: Path | None = None
    """The directory that a rootless daemon sees at `run_root`, where a user's own directories could not be gone through;
    None: it is the directory itself."""

    @property
    def is_root(self) -> bool:
        """True for root's places; False for the places of an ordinary user, whose daemon has a user namespace."""
        return self.run_source is None

    @property
    def is_closed(self) -> bool:
        """True if no other user may go through `run_root`: there are no containers."""
        return not self.is_root and self.run_root == self.sockets

    def without_namespace(self) -> UserPlaces:
        """The same for a daemon that has no user namespace: an ordinary user's own directories, as they are."""
        if self.is_root:
            return self
        return replace(self, run_root=self.sockets, share_root=self.state_dir.with_name("snapshotd-share"))

    def socket_of(self, state_dir: Path) -> Path:
        """Path of the socket of a state directory's daemon, by default."""
        lies_there = not self.is_root and state_dir == self.state_dir  # a home may be on a network's file system
        return (self.sockets if lies_there else state_dir) / "snapshotd.sock"


OF_ROOT = UserPlaces(
    state_dir=Path("/var/lib/snapshotd"),
    sockets=Path("/run/snapshotd"),
    run_root=Path("/run/snapshotd"),
    share_root=Path("/var/lib/snapshotd-share"),
)
COVERED = Path("/root")
"""A directory that every machine has, and that no ordinary user can enter: a rootless daemon mounts its own over it, in
its own mount namespace."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # fewer methods to compile: every command imports this
class Config:
    """All settings. The environment variable of each is `variable` in its field's metadata."""

    state_dir: str = _text(
        "SNAPSHOTD_STATE_DIR",
        "/var/lib/snapshotd",
        "/var/lib/snapshotd as root, else `$XDG_STATE_HOME/snapshotd` (`~/.local/state/snapshotd`)",
        "The daemon's state directory; `--state-dir` comes first.",
        "a path",
    )
    socket: str = _text(
        "SNAPSHOTD_SOCKET",
        "",
        "`snapshotd.sock` in the state directory; without root, for the default one, in `$XDG_RUNTIME_DIR/snapshotd`",
        "The daemon's socket; `--socket` comes first. Where only a socket is named, no command starts a daemon.",
        "a path",
    )
    host: str = _text(
        "SNAPSHOTD_HOST",
        "",
        "this machine",
        "The machine of the daemon that commands and clients use ([access](access.md)); `--socket` and `--state-dir` come first.",
        "`https://HOST:PORT`, `ssh://USER@HOST` or `unix://SOCKET`",
    )
    token: str = _text(
        "SNAPSHOTD_TOKEN",
        "",
        "the one that `snapshotd login` has kept",
        "The token that is shown to a daemon on another machine.",
        "a token",
    )
    tls_pin: str = _text(
        "SNAPSHOTD_TLS_PIN",
        "",
        "the one that `snapshotd login` has kept",
        "Fingerprint of that daemon's certificate.",
        "`sha256:` and 64 hexadecimal characters",
    )
    tls_ca: str = _text(
        "SNAPSHOTD_TLS_CA",
        "",
        "the system's, where nothing is kept",
        "Certificates that may have signed that daemon's, in PEM.",
        "a path",
    )
    listen: str = _text(
        "SNAPSHOTD_LISTEN",
        "",
        "no address",
        "Where other machines reach the daemon, with TLS: `0.0.0.0:7676`; on the loopback `http://` goes without "
        "([access](access.md)). `serve --listen` comes first.",
        "an address of this machine and a port",
    )
    tls_cert: str = _text(
        "SNAPSHOTD_TLS_CERT",
        "",
        "a certificate that the daemon makes",
        "The certificate that other machines are shown, in PEM, with those that it was signed by.",
        "a path",
    )
    tls_key: str = _text("SNAPSHOTD_TLS_KEY", "", "as the certificate", "The key of the certificate, in PEM.", "a path")
    reconnect_s: float = _setting(
        "SNAPSHOTD_RECONNECT_S",
        600.0,
        "600",
        "Seconds that a command which follows a run waits for the next daemon; for a lost answer, at most 10. 0: it does not wait.",
        _seconds,
        "a number of seconds, 0 or more",
    )
    store: str = _text(
        "SNAPSHOTD_STORE",
        "",
        "`repo/store` in the state directory",
        "Address of the packs, decided at a state directory's first start ([storage](storage.md)).",
        "the address of a store",
    )
    fleet: str = _text(
        "SNAPSHOTD_FLEET",
        "",
        "none: the daemon is alone",
        "Database of the fleet that the daemon is a node of ([fleet](fleet.md)); all nodes share `SNAPSHOTD_STORE`.",
        "the address of a PostgreSQL database",
    )
    node: str = _setting(
        "SNAPSHOTD_NODE",
        "",
        "the host's name up to its first dot",
        "Name of the node in its fleet.",
        _node,
        "1 to 63 of `a-z`, `0-9` and `-`, no `-` at either end",
    )
    node_address: str = _setting(
        "SNAPSHOTD_NODE_ADDRESS",
        "",
        "none",
        "Where clients and other nodes reach the node.",
        _https,
        "`https://HOST:PORT`",
    )
    node_cpus: int | None = _count(
        "SNAPSHOTD_NODE_CPUS", None, "the machine's", "Processors that the node offers to forks of the fleet.", 1, 65536
    )
    node_memory_bytes: int | None = _count(
        "SNAPSHOTD_NODE_MEMORY",
        None,
        "what is available",
        "Bytes of memory that the node's sandboxes may take together before forks go to other nodes.",
        _BYTES_LEAST,
        _BYTES_MOST,
    )
    node_starting: int = _count(
        "SNAPSHOTD_NODE_STARTING", 64, "64", "Sandboxes that may be starting on the node at once.", 1, 65536
    )
    node_cache_bytes: int | None = _count(
        "SNAPSHOTD_NODE_CACHE",
        None,
        "a tenth of the state directory's file system",
        "Bytes of disk that may keep parts of the fleet's packs ([fleet](fleet.md#a-nodes-disk-is-a-cache)). 0: none.",
        0,
        _BYTES_MOST,
    )
    image_builds: str = _text(
        "SNAPSHOTD_IMAGE_BUILDS",
        "/var/cache/snapshotd/images",
        "`/var/cache/snapshotd/images`",
        "Folder of the images that this machine has built from packages, for all state directories ([images](images.md)).",
        "a path",
    )
    layer_budget_bytes: int | None = _count(
        "SNAPSHOTD_LAYER_BUDGET",
        None,
        "half of the layers' file system",
        "Bytes that all layers may take before layers of stored snapshots are evicted.",
        0,
        _BYTES_MOST,
    )
    warm_containers: int = _count(
        "SNAPSHOTD_WARM", 2, "2", "Spare containers for each kind of sandbox lately used. 0: none.", 0, 64
    )
    forks_at_once: int = _count(
        "SNAPSHOTD_FORKS_AT_ONCE",
        8,
        "8",
        "Containers that one `fork` starts in parallel; more only queue for processors.",
        1,
        256,
    )
    output_bytes: int = _count(
        "SNAPSHOTD_OUTPUT_LIMIT",
        4 << 30,
        "4294967296 (4 GiB)",
        "Bytes recorded of one stream of one command. The command goes on; the rest is dropped.",
        _BYTES_LEAST,
        _BYTES_MOST,
    )
    followed_bytes: int = _count(
        "SNAPSHOTD_FOLLOW_LIMIT",
        256 << 20,
        "268435456 (256 MiB)",
        "Bytes of events of one run that are followed live. More output comes from the record when the run has ended.",
        _BYTES_LEAST,
        _BYTES_MOST,
    )
    gateway_memory_bytes: int = _count(
        "SNAPSHOTD_GATEWAY_MEMORY",
        512 << 20,
        "536870912 (512 MiB)",
        "Bytes of memory that the requests of all gateways may take together ([gateway](gateway.md)).",
        _BYTES_LEAST,
        _BYTES_MOST,
    )
    idle_timeout_s: float = _setting(
        "SNAPSHOTD_IDLE_TIMEOUT",
        1800.0,
        "1800",
        "Seconds without a command after which a fork, or a sandbox that a command started again, ends. 0: never.",
        _seconds,
        "a number of seconds, 0 or more",
    )
    folder_keep_last: int = _count(
        "SNAPSHOTD_FOLDER_KEEP_LAST",
        100,
        "100",
        "Newest snapshots that keep their files, for a folder that gets its first one ([agents](agents-you-run.md)).",
        1,
        1_000_000,
    )
    folder_keep_s: float = _setting(
        "SNAPSHOTD_FOLDER_KEEP_S",
        86400.0,
        "86400 (a day)",
        "Seconds for which every snapshot of such a folder keeps its files.",
        _some_seconds,
        "a number of seconds, above 0",
    )
    folder_prune_s: float = _setting(
        "SNAPSHOTD_FOLDER_PRUNE_S",
        3600.0,
        "3600",
        "Seconds between two prunes of users' folders. 0: `snapshotd prune` alone prunes them.",
        _seconds,
        "a number of seconds, 0 or more",
    )
    starts_with: str = _setting(
        "SNAPSHOTD_EXEC",
        "starter",
        "`starter`",
        "Starter of commands in sandboxes, and maker of sandboxes. `runc`: `runc exec` and `runc run`, with the same "
        "confinement, and slower.",
        _one_of("starter", "runc"),
        "`starter` or `runc`",
    )
    mode: str = _setting(
        "SNAPSHOTD_MODE",
        "",
        "the best one that keeps a sandbox's root user from being root here",
        "Way to run sandboxes, from which the daemon does not fall back. `pivot`: a sandbox's root user is nobody on this "
        "machine. `pivot-root`: it is root on this machine, held by capabilities and a system call filter alone, for "
        "kernels before 5.19 ([threat model](threat-model.md)). `rootless`: the daemon of an ordinary user. `folder`: sandboxes "
        "are plain folders, without isolation, also where a command does not say `--isolation none` ([folder "
        "mode](folder-mode.md)).",
        _one_of("pivot", "pivot-root", "rootless", "folder"),
        "`pivot`, `pivot-root`, `rootless` or `folder`",
    )
    docker_host: str = _text(
        "DOCKER_HOST",
        "unix:///var/run/docker.sock",
        "`unix:///var/run/docker.sock`",
        "Address of the Docker engine; sandboxes need a unix socket.",
        "an address",
    )
    given: frozenset[str] = frozenset()
    """Names of the settings that the environment gave."""

    def without_secrets(self) -> dict[str, Any]:
        """Variable to value of each setting, for people: without passwords, and without the token, which only clients have."""
        values = {item.metadata["variable"]: getattr(self, item.name) for item in settings() if item.name != "token"}
        return {name: _PASSWORD.sub("", v) if isinstance(v, str) else v for name, v in values.items()}


def settings() -> list[Field[Any]]:
    """The fields that a variable sets."""
    return [item for item in fields(Config) if item.metadata]


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return str(next(item.metadata["variable"] for item in settings() if item.name == name))


def read(only: Collection[str] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """The settings as the environment has them; an empty variable counts as none. With `only`, the other settings keep
    their defaults, and nobody complains about them. UsageError for a value that is not allowed."""
    found: dict[str, Any] = {}
    for item in settings():
        name, text = item.metadata["variable"], environ.get(item.metadata["variable"], "")
        if not text or (only is not None and item.name not in only):
            continue
        try:
            found[item.name] = item.metadata["parse"](text)
        except ValueError:
            allowed = item.metadata["allowed"]
            raise UsageError(
                f"{name} is {text[:80]!r}, but it takes {allowed}; set that, or unset it for the default"
            ) from None
    given = frozenset(found)
    if "state_dir" not in given:
        found["state_dir"] = str(places(environ).state_dir)
    return Config(**found, given=given)


def places(environ: Mapping[str, str] = os.environ) -> UserPlaces:
    """The places of the user who runs this process, root inside of a user namespace included."""
    uid = os.geteuid()
    if uid == 0:
        return OF_ROOT
    home = environ.get("HOME") or os.path.expanduser("~")
    state_home, runtime_dir = environ.get("XDG_STATE_HOME", ""), environ.get("XDG_RUNTIME_DIR", "")
    state = Path(state_home) if state_home.startswith("/") else Path(home, ".local", "state")
    sockets = Path(runtime_dir, "snapshotd") if runtime_dir.startswith("/") else Path(f"/tmp/snapshotd-{uid}")
    return UserPlaces(state / "snapshotd", sockets, COVERED / "run", COVERED / "share", run_source=sockets / "run")


def node_of(config: Config) -> str:
    """The name of the node that a daemon with these settings is. UsageError: the host's name cannot be one."""
    if config.node:
        return config.node
    from socket import gethostname  # few processes need it

    name = gethostname().partition(".")[0].lower()
    try:
        return _node(name)
    except ValueError:
        raise UsageError(
            f"the host's name {name[:80]!r} cannot be that of a node: set SNAPSHOTD_NODE to 1 to 63 of a-z, 0-9 and -"
        ) from None


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's folder of what commands keep for themselves."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return (Path(base) if base.startswith("/") else Path(home, ".config")) / "snapshotd"


def read_variables(names: Collection[str]) -> dict[str, str]:
    """Read the environment variables among `names` that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}
