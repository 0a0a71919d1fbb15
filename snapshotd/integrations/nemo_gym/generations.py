"""The fence of a rollout: which of its sandboxes is the present one. Each has a generation, and a restore draws the next."""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import Conflict, NotFound

_NAMESPACE = "nemo-gym/executions"


class StaleHandleError(RuntimeError):
    """The rollout was restored meanwhile: this handle's sandbox is no longer its own."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sandbox of a rollout: `execution` stays, and `number` is drawn anew by each restore."""

    execution: str
    number: int


class Generations:
    """Kept by the daemon, so that every process finds the same one. Errors of every method: the client's."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client

    async def begin(self, execution: str) -> Generation:
        """The first one of a rollout."""
        await self._client.put_value(_NAMESPACE, execution, {"generation": 1}, expected_version=0)
        return Generation(execution, 1)

    async def draw(self, last: Generation) -> Generation:
        """Draw the generation behind `last`. Handles of `last` are stale from now on. StaleHandleError: another restore was
        first."""
        drawn = Generation(last.execution, last.number + 1)
        found = await self._find(last.execution)
        if found is None or found[0] != last.number:
            raise _stale(last)
        try:
            value = {"generation": drawn.number}
            await self._client.put_value(_NAMESPACE, last.execution, value, expected_version=found[1])
        except Conflict as exc:
            raise _stale(last) from exc
        return drawn

    async def check(self, generation: Generation) -> None:
        """StaleHandleError: a later generation was drawn, or the rollout was retired."""
        found = await self._find(generation.execution)
        if found is None or found[0] != generation.number:
            raise _stale(generation)

    async def retire(self, execution: str) -> None:
        """No handle of the rollout is good from now on. Not an error when none was."""
        try:
            await self._client.delete_value(_NAMESPACE, execution)
        except NotFound:
            pass

    async def _find(self, execution: str) -> tuple[int, int] | None:
        try:
            found = await self._client.get_value(_NAMESPACE, execution)
        except NotFound:
            return None
        return int(found.value["generation"]), found.version


def _stale(generation: Generation) -> StaleHandleError:
    return StaleHandleError(
        f"generation {generation.number} of execution {generation.execution} is over: another restore was first, or it was retired"
    )
