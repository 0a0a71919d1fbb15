"""The API's words about forks: the request, and how each child differs."""

from __future__ import annotations

from pydantic import Field, SecretStr

from snapshotd import types as t
from snapshotd.daemon.http.models import IDLE, LimitsRequest, Request, check_argv, environment
from snapshotd.daemon.http.models_mind import EditFields
from snapshotd.daemon.http.wire import FORK_MAX, QUEUE_MAX, TIMEOUT_MAX_S
from snapshotd.engine.base import ForkPart, Variant
from snapshotd.errors import UsageError


class VariantFields(Request):
    """One child of a fork. `{index}` and `{variant}` in its name, its arguments and the values of its environment
    become its number from 0 and its label."""

    label: str
    name: str | None = Field(None, description="Its name, in place of the fork's.")
    args: list[str] | None = Field(None, description="Its program's arguments, in place of the fork's.")
    env: dict[str, str] = Field(default_factory=dict, description="Added to the environment of the source.")
    secrets: dict[str, SecretStr] = Field(
        default_factory=dict, description="Environment whose values are recorded nowhere in plain."
    )
    edit: EditFields | None = Field(None, description="Changes of files and mind: its first snapshot.")
    model: str | None = Field(
        None, min_length=1, max_length=256, description="Every model request through its gateway asks for this model."
    )
    network: t.Network | None = Field(None, description="Null: the source's.")
    limits: LimitsRequest | None = Field(None, description="The fields that are given go before the source's limits.")

    def variant(self) -> Variant:
        """UsageError names the malformed part."""
        if not t.NAME_PATTERN.fullmatch(self.label):
            raise UsageError(
                f"{self.label!r} cannot be a variant: use up to 64 letters, digits and ._- , starting with a letter or digit"
            )
        args = None if self.args is None else tuple(self.args)
        check_argv(args or ())
        twice = next((key for key in self.secrets if key in self.env), None)
        if twice is not None:
            raise UsageError(
                f"{twice} is a variable and a secret of the variant {self.label}, so its value would be recorded; leave "
                "one of them out"
            )
        if self.model is not None and not self.model.isprintable():
            raise UsageError(f"the model of the variant {self.label} has characters that no model's name has")
        limits = self.limits
        return Variant(
            self.label,
            self.name,
            args,
            environment(self.env),
            environment({key: value.get_secret_value() for key, value in self.secrets.items()}),
            None if self.edit is None else self.edit.request(),
            self.model,
            self.network,
            ()
            if limits is None
            else tuple((key, getattr(limits.limits(), key)) for key in sorted(limits.model_fields_set)),
        )


class ForkPartFields(Request):
    experiment: str = Field(pattern="^[0-9a-f]{32}$", description="The same for all parts.")
    first: int = Field(ge=0, lt=QUEUE_MAX, description="The number of the first child of this part.")
    count: int = Field(ge=1, le=QUEUE_MAX, description="The number of children of all parts.")

    def part(self) -> ForkPart:
        return ForkPart(t.ExperimentID(self.experiment), self.first, self.count)


class ForkRequest(Request):
    n: int = Field(1, ge=1, le=FORK_MAX)
    args: list[str] | None = Field(
        None, description="Start the program in each with these; `{index}` is the fork's number from 0."
    )
    name: str | None = None
    resume: bool = Field(False, description="Replay the program up to the snapshot; it goes on from there.")
    idle_timeout_s: float | None = Field(
        None, ge=0, le=TIMEOUT_MAX_S, allow_inf_nan=False, description=f"{IDLE} Null: the daemon's default."
    )
    variants: list[VariantFields] = Field(
        default_factory=list, max_length=FORK_MAX, description="One fork for each; `n` may be left out then."
    )
    part: ForkPartFields | None = Field(
        None, description="The place of these forks in a larger fork that is made piece by piece."
    )

    @property
    def count(self) -> int:
        return len(self.variants) if self.variants and "n" not in self.model_fields_set else self.n
