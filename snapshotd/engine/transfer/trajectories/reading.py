"""Messages and replies in any of the recorded forms, read for a trajectory that others are to understand: OpenAI's chat
and responses, Anthropic's messages, Gemini's contents, and whatever a program of its own has said.

The forms are told apart by their shape: a program that uses the library may record messages of any provider. Nothing
raises; content of another shape is shown as JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from snapshotd.types import Message

Source = Literal["system", "user", "agent"]

_SOURCES: dict[str, Source] = {
    "system": "system",
    "developer": "system",
    "assistant": "agent",
    "model": "agent",
    "ai": "agent",
}
_RESULT_ROLES = frozenset({"tool", "function"})
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})
_OUTPUT = "_call_output"


@dataclass(frozen=True, slots=True)
class SpokenCall:
    """A call that a model asks for. `arguments` is parsed JSON where it is JSON."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class SpokenResult:
    """A result that a message hands to the model. `id` None: the message does not say which call it belongs to."""

    id: str | None
    text: str
    failed: bool = False


@dataclass(slots=True)
class Spoken:
    """The content of one message. `left_out`: kinds of parts that are no text (images, files)."""

    source: Source
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[SpokenCall] = field(default_factory=list)
    results: list[SpokenResult] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    @property
    def reasoning(self) -> str | None:
        return "\n".join(self.thoughts) or None


def spoken(message: Message) -> Spoken:
    """Read one message."""
    found = Spoken(_SOURCES.get(message.role, "user"))
    if message.role in _RESULT_ROLES:
        _result(found, message.content)
    else:
        _take(found, message.content)
    return found


def _result(found: Spoken, content: Any) -> None:
    item = content if isinstance(content, dict) else {"content": content}
    if str(item.get("type", "")).endswith(_OUTPUT):
        _take(found, item)
        return
    call_id = item.get("tool_call_id", item.get("name"))
    text = text_of(item.get("content", item), found)
    found.results.append(SpokenResult(_text(call_id), text))


def _take(found: Spoken, content: Any) -> None:
    if content is None or content == "":
        return
    if isinstance(content, str):
        found.texts.append(content)
    elif isinstance(content, list):
        for part in content:
            _part(found, part)
    elif isinstance(content, dict):
        _object(found, content)
    else:
        found.texts.append(_json(content))


def _object(found: Spoken, item: dict[str, Any]) -> None:
    """A chat message with more than a content, or an item of the Responses API."""
    kind = item.get("type")
    if isinstance(kind, str) and kind.endswith(_OUTPUT):
        failed = item.get("status") == "failed"
        found.results.append(SpokenResult(_text(item.get("call_id")), text_of(item.get("output"), found), failed))
    elif isinstance(kind, str) and kind.endswith("_call") and isinstance(item.get("call_id"), str):
        given = next((item[name] for name in ("arguments", "input", "action") if item.get(name) is not None), None)
        found.calls.append(SpokenCall(item["call_id"], str(item.get("name") or kind), _parse(given)))
    elif kind == "reasoning":
        for name in ("summary", "content"):
            found.thoughts += [part["text"] for part in _objects(item.get(name)) if isinstance(part.get("text"), str)]
    elif "content" in item or "tool_calls" in item or "function_call" in item:
        _take(found, item.get("content"))
        thought = item.get("reasoning_content") or item.get("reasoning")
        if isinstance(thought, str) and thought:
            found.thoughts.append(thought)
        for call in _objects(item.get("tool_calls")):
            _chat_call(found, call)
        if isinstance(old := item.get("function_call"), dict):
            _chat_call(found, {"id": old.get("name"), "function": old})
    else:
        _part(found, item)


def _chat_call(found: Spoken, call: dict[str, Any]) -> None:
    for kind, given in (("function", "arguments"), ("custom", "input")):
        if isinstance(inner := call.get(kind), dict):
            found.calls.append(
                SpokenCall(str(call.get("id") or ""), str(inner.get("name") or "tool"), _parse(inner.get(given)))
            )


def _part(found: Spoken, part: Any) -> None:
    kind = _text(part.get("type")) if isinstance(part, dict) else None
    if isinstance(part, str):
        found.texts.append(part)
    elif not isinstance(part, dict):
        found.texts.append(_json(part))
    elif kind in _TEXTS:
        found.texts.append(_text(part.get("text", part.get("refusal"))) or "")
    elif kind == "thinking":
        found.thoughts.append(_text(part.get("thinking")) or "")
    elif kind == "redacted_thinking":
        found.left_out.append("redacted thinking")
    elif kind == "tool_use":
        found.calls.append(
            SpokenCall(str(part.get("id") or ""), str(part.get("name") or "tool"), _parse(part.get("input")))
        )
    elif kind == "tool_result":
        text = text_of(part.get("content"), found)
        found.results.append(SpokenResult(_text(part.get("tool_use_id")), text, part.get("is_error") is True))
    elif kind is None and _gemini_part(found, part):
        pass
    elif kind is not None and any(word in kind for word in ("image", "audio", "file", "document", "video")):
        found.left_out.append(kind[:40])
        found.texts.append(f"[{kind[:40]}]")
    else:
        found.texts.append(_json(part))


def _gemini_part(found: Spoken, part: dict[str, Any]) -> bool:
    """Read a part of Gemini's contents: its field says what it is. False: it is none."""
    if isinstance(said := part.get("text"), str):
        (found.thoughts if part.get("thought") is True else found.texts).append(said)
    elif isinstance(call := part.get("functionCall"), dict):
        found.calls.append(SpokenCall(str(call.get("id") or ""), str(call.get("name") or "tool"), call.get("args")))
    elif isinstance(result := part.get("functionResponse"), dict):
        given = result.get("response")
        fields = given if isinstance(given, dict) else {"output": given}
        name = "output" if "output" in fields else "error" if "error" in fields else None
        value = fields if name is None else fields[name]
        text = value if isinstance(value, str) else _json(value)
        found.results.append(SpokenResult(_text(result.get("id")), text, name == "error"))
    elif (name := next((name for name in ("inlineData", "fileData") if name in part), None)) is not None:
        found.left_out.append(name)
        found.texts.append(f"[{name}]")
    else:
        return False
    return True


def text_of(content: Any, whole: Spoken | None = None) -> str:
    """A content as one text. Parts that are no text are noted in `whole`."""
    if isinstance(content, dict) and not ("content" in content or "text" in content):
        return _json(content)
    inner = Spoken("user")
    _take(inner, content)
    if whole is not None:
        whole.left_out += inner.left_out
    return inner.text


def reply_text(result: Any) -> str | None:
    """The words of a model call's reply as a program has recorded it; None where the form is not known."""
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return None
    for choice in _objects(result.get("choices")):
        message = choice.get("message")
        return spoken(Message("assistant", message)).text if isinstance(message, dict) else None
    if "output" in result:
        items = [spoken(Message("assistant", item)).text for item in _objects(result["output"])]
        return "\n".join(filter(None, items))
    return spoken(Message("assistant", result)).text if "content" in result else None


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools of a request in the form of OpenAI's chat; a kind that has no such form stays as it is."""
    found = []
    several = [
        _objects(tool.get("functionDeclarations")) if "functionDeclarations" in tool else [tool]
        for tool in _objects(tools)
    ]
    for tool in itertools.chain.from_iterable(several):
        if isinstance(tool.get("function"), dict) or not isinstance(tool.get("name"), str):
            found.append(tool)
            continue
        schema = tool.get("input_schema", tool.get("parameters", tool.get("parametersJsonSchema")))
        if schema is None and tool.get("type") not in (None, "function", "custom"):
            found.append(tool)  # one that the provider runs itself
            continue
        function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
        found.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return found


def _parse(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
