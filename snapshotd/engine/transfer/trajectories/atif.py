"""The Agent Trajectory Interchange Format, version 1.7, as models that refuse anything else.

Source: Harbor, RFC 0001 (trajectory format), version 1.7. The rules that a single object cannot show are validators:
fields that only an agent's step has, ids in order, references that lead somewhere.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

VERSION: Literal["ATIF-v1.7"] = "ATIF-v1.7"
Extra = dict[str, Any] | None
Count = int | None
_AGENTS_OWN = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SubagentTrajectoryRef(_Strict):
    """Leads to an embedded trajectory by its id, or to a file by its path."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Extra = None

    @model_validator(mode="after")
    def _leads_somewhere(self) -> Self:
        if self.trajectory_id is None and self.trajectory_path is None:
            raise ValueError("a reference needs a trajectory_id or a trajectory_path")
        return self


class ImageSource(_Strict):
    """An image of a message, which lies elsewhere."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    path: str


class ContentPart(_Strict):
    """A part of a message that has images."""

    type: Literal["text", "image"]
    text: str | None = None
    source: ImageSource | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        if (self.text is not None, self.source is not None) != (self.type == "text", self.type == "image"):
            raise ValueError(f"a part of type {self.type} needs its own field, and no other")
        return self


Content = str | list[ContentPart]


class AtifCall(_Strict):
    """A tool call of a step."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class ObservationResult(_Strict):
    """The result of a call, or of something that no call asked for."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentTrajectoryRef] | None = None
    extra: Extra = None


class Observation(_Strict):
    """The answers of the environment within a step."""

    results: list[ObservationResult]


class Metrics(_Strict):
    """The numbers of a step's model call."""

    prompt_tokens: Count = Field(default=None, ge=0)
    completion_tokens: Count = Field(default=None, ge=0)
    cached_tokens: Count = Field(default=None, ge=0)
    cost_usd: float | None = Field(default=None, ge=0)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra = None


class AtifStep(_Strict):
    """One step."""

    step_id: int = Field(ge=1)
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: Count = Field(default=None, ge=0)
    extra: Extra = None

    @field_validator("timestamp")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            datetime.fromisoformat(value.replace("Z", "+00:00"))
        return value

    @model_validator(mode="after")
    def _only_an_agent_has(self) -> Self:
        found = [name for name in _AGENTS_OWN if self.source != "agent" and getattr(self, name) is not None]
        if found:
            raise ValueError(f"only a step of an agent has {', '.join(found)}")
        if self.llm_call_count == 0 and (self.metrics is not None or self.reasoning_content is not None):
            raise ValueError("a step without a model call has no metrics and no reasoning_content")
        return self

    @model_validator(mode="after")
    def _answers_its_own_calls(self) -> Self:
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for result in () if self.observation is None else self.observation.results:
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(f"the result of {result.source_call_id!r} answers no call of step {self.step_id}")
        return self


class AtifAgent(_Strict):
    """The agent of a trajectory."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: Extra = None


class FinalMetrics(_Strict):
    """Sums over all steps."""

    total_prompt_tokens: Count = Field(default=None, ge=0)
    total_completion_tokens: Count = Field(default=None, ge=0)
    total_cached_tokens: Count = Field(default=None, ge=0)
    total_cost_usd: float | None = Field(default=None, ge=0)
    total_steps: Count = Field(default=None, ge=0)
    extra: Extra = None


class Head(_Strict):
    """A trajectory without its steps and sub-agents, which are written one by one."""

    schema_version: Literal["ATIF-v1.7"] = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra = None


class AtifTrajectory(Head):
    """A whole document."""

    steps: list[AtifStep] = Field(min_length=1)
    subagent_trajectories: list[AtifTrajectory] | None = None

    @model_validator(mode="after")
    def _counts_its_steps(self) -> Self:
        for number, step in enumerate(self.steps, 1):
            if step.step_id != number:
                raise ValueError(f"step {number} has the step_id {step.step_id}; they count from 1")
        return self

    @model_validator(mode="after")
    def _names_its_subagents(self) -> Self:
        known = [one.trajectory_id for one in self.subagent_trajectories or ()]
        if None in known or len(set(known)) < len(known):
            raise ValueError("every embedded trajectory needs a trajectory_id of its own")
        for step in self.steps:
            for result in () if step.observation is None else step.observation.results:
                for ref in result.subagent_trajectory_ref or ():
                    if ref.trajectory_path is None and ref.trajectory_id not in known:
                        raise ValueError(f"step {step.step_id} refers to {ref.trajectory_id!r}, which is not embedded")
        return self


def problem(document: bytes | str) -> str | None:
    """The first thing that is wrong with a document, and its place; None if it is right."""
    try:
        AtifTrajectory.model_validate_json(document)
    except ValidationError as exc:
        return first_of(exc)
    return None


def first_of(error: ValidationError) -> str:
    """The first problem of a refused object, in one line."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, found["loc"]))
    return f"{place}: {found['msg']}" if place else str(found["msg"])
