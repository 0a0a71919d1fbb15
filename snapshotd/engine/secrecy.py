"""Secrets of trajectories: records hold markers, running commands see the originals (docs/secrets.md).

A trajectory's environment is recorded with markers in place of its secrets and of values that look like one. All
records of the trajectory are searched for these values. Names that begin with `PROVIDER` are for the gateway and
`TENANT` is for the store: they never enter a sandbox.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

from snapshotd.catalog.base import Catalog
from snapshotd.errors import UsageError
from snapshotd.repo.spool import BlobWriter, Spool
from snapshotd.secrets.base import MARKER
from snapshotd.secrets.configured import MIN_VALUE_BYTES
from snapshotd.secrets.redactor import Funnel, Redactor
from snapshotd.secrets.vault import Vault
from snapshotd.terms import TENANT_VARIABLE
from snapshotd.types import DEFAULT_TENANT, AgentSpec, BlobID, Trajectory, TrajectoryID

PROVIDER = "SNAPSHOTD_PROVIDER_"
TENANT = TENANT_VARIABLE
_REMEMBERED = 256
"""Funnels; making one costs a millisecond."""
SHARED = TrajectoryID("0" * 32)
"""Owner of the secrets in data that belong to no trajectory (the key-value store)."""

Env = tuple[tuple[str, str], ...]


class Secrecy:
    """See the module's text. Thread-safe."""

    def __init__(self, vault: Vault, catalog: Catalog) -> None:
        self.vault, self._catalog = vault, catalog
        self._redactor = Redactor(vault)
        self._funnels: OrderedDict[tuple[TrajectoryID, TrajectoryID], Funnel] = OrderedDict()
        """By trajectory and owner."""
        self._lock = threading.Lock()

    def environment(self, trajectory: TrajectoryID, env: Env, secrets: Env) -> Env:
        """The environment of a new trajectory as it is recorded. UsageError: a secret that cannot be one (too short to
        be found)."""
        for name, value in secrets:
            if len(value.encode(errors="surrogatepass")) < MIN_VALUE_BYTES:
                if name.startswith(PROVIDER):
                    kind = name.removeprefix(PROVIDER).partition("_")[0].lower()
                    raise UsageError(
                        f"the key for the provider {kind} has {len(value)} characters, and no key is shorter than {MIN_VALUE_BYTES}: look "
                        "at the variable or argument that it comes from, or leave it out if the provider takes none"
                    )
                raise UsageError(
                    f"the secret {name} has less than {MIN_VALUE_BYTES} bytes and would be found everywhere; make it plain environment"
                )
        names = {name for name, _ in secrets}
        funnel = self._redactor.funnel(trajectory, {_secret_name(name): value for name, value in secrets})
        kept = [(name, value) for name, value in env if name not in names]
        return tuple(
            (name, value if name == TENANT else funnel.conceal_text(value)) for name, value in (*kept, *secrets)
        )

    def of(self, trajectory: Trajectory) -> Funnel:
        """The funnel of a trajectory."""
        return self._funnel(trajectory, trajectory.id)

    def _funnel(self, trajectory: Trajectory, owner: TrajectoryID) -> Funnel:
        """The funnel that finds the secrets of `trajectory`, and keeps them for `owner`."""
        with self._lock:
            funnel = self._funnels.get((trajectory.id, owner))
            if funnel is None:
                ancestors = tuple(self._ancestors(trajectory))
                plain = self._redactor.funnel(trajectory.id, None, ancestors)
                configured = {
                    _secret_name(name): plain.reveal_text(value)
                    for name, value in trajectory.env
                    if MARKER.fullmatch(value)
                }
                funnel = self._redactor.funnel(owner, configured, ancestors if owner == trajectory.id else ())
                self._funnels[trajectory.id, owner] = funnel
            self._funnels.move_to_end((trajectory.id, owner))
            while len(self._funnels) > _REMEMBERED:
                self._funnels.popitem(last=False)
            return funnel

    def conceal_agent(self, trajectory: Trajectory, agent: AgentSpec) -> AgentSpec:
        """The program as it is recorded: secrets of the trajectory's environment in its arguments are concealed."""
        return replace(agent, argv=tuple(map(self.of(trajectory).conceal_text, agent.argv)))

    def shared_funnel(self, trajectory: Trajectory | None = None) -> Funnel:
        """The funnel for data that belong to no trajectory; data from `trajectory` are searched for its secrets."""
        return self._redactor.funnel(SHARED) if trajectory is None else self._funnel(trajectory, SHARED)

    def apart(self, owner: TrajectoryID, secrets: Env = ()) -> Funnel:
        """The funnel for data of something that is no trajectory, and that `forget` forgets: it finds `secrets`. UsageError:
        one cannot be a secret."""
        self.environment(owner, (), secrets)
        return self._redactor.funnel(owner, {_secret_name(name): value for name, value in secrets})

    def inside(self, trajectory: Trajectory) -> dict[str, str]:
        """The environment of the trajectory's commands, with secrets revealed."""
        funnel, env = self.of(trajectory), dict(trajectory.env)
        names = (name for name, _ in trajectory.env if name != TENANT and not name.startswith(PROVIDER))
        return {name: funnel.reveal_text(env[name]) for name in names}

    def reveal_inside(self, trajectory: Trajectory, text: str) -> str:
        """Reveal the secrets in a text for a command in the sandbox, but not those that never enter a sandbox: the sandbox
        itself may have written the text."""
        funnel = self.of(trajectory)
        kept = tuple(_secret_name(name) for name in (PROVIDER, TENANT))

        def original(found: re.Match[str]) -> str:
            return found[0] if found[1].startswith(kept) else funnel.reveal_text(found[0])

        return MARKER.sub(original, text)

    def tenant(self, trajectory: Trajectory) -> str:
        """The tenant of the key-value store that the trajectory's agents read and write."""
        recorded = dict(trajectory.env).get(TENANT)
        return DEFAULT_TENANT if recorded is None else self.of(trajectory).reveal_text(recorded)

    def forget_funnels(self, trajectory: TrajectoryID) -> None:
        """Forget a trajectory's cached funnels: its environment has changed."""
        with self._lock:
            for owner in (trajectory, SHARED):
                self._funnels.pop((trajectory, owner), None)

    def forget(self, trajectory: TrajectoryID) -> None:
        """Forget the secrets of a trajectory that is gone."""
        self.forget_funnels(trajectory)
        self.vault.forget(trajectory)

    def _ancestors(self, trajectory: Trajectory) -> Iterator[TrajectoryID]:
        while trajectory.forked_from is not None:
            owner = self._catalog.snapshots.get(trajectory.forked_from).trajectory
            yield owner
            trajectory = self._catalog.trajectories.get(owner)


def _secret_name(variable: str) -> str:
    """The name of the secret that a variable of the environment holds."""
    return f"env-{variable}"[:64]


class ConcealedWriter:
    """Writes text into the spool with its secrets redacted. `shown` gets the same, piece by piece."""

    def __init__(self, spool: Spool, funnel: Funnel, shown: Callable[[bytes], None] = lambda data: None) -> None:
        self._writer: BlobWriter = spool.writer()
        self._shown = shown
        self._concealer = funnel.concealer(self._pass_on)

    def restore(self, data: bytes) -> None:
        """Continue with the bytes that an earlier daemon has already shown."""
        self._writer.write(data)

    def _pass_on(self, data: bytes) -> None:
        self._writer.write(data)
        self._shown(data)

    def write(self, data: bytes) -> None:
        self._concealer.write(data)

    def save(self) -> BlobID:
        """As `BlobWriter.save`."""
        self._concealer.finish()
        return self._writer.save()

    def discard(self) -> None:
        self._writer.discard()
