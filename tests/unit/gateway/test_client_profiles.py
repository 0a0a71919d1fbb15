"""What known clients change in each run does not make another request of it."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.clients import is_aside
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.openai_responses import OpenAIResponses

CLAUDE_DATE = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# currentDate\n"
    "Today's date is {date}.\n</system-reminder>"
)
CODEX_PLACE = (
    "<environment_context>\n  <cwd>/workspace</cwd>\n  <current_date>{date}</current_date>\n"
    "  <timezone>{zone}</timezone>\n</environment_context>"
)
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{mark}; cc_entrypoint=sdk-cli;"


def _claude(*texts: str) -> dict[str, Any]:
    return {
        "model": "m",
        "system": [{"type": "text", "text": BILLING.format(mark=texts[-1])}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in texts[:-1]]}],
    }


def _codex(date: str, zone: str, turn: str, task: str) -> dict[str, Any]:
    def message(text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{turn}",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
            "internal_chat_message_metadata_passthrough": {"turn_id": turn, "create_time": 1795595203.5},
        }

    return {"model": "m", "input": [message(CODEX_PLACE.format(date=date, zone=zone)), message(task)]}


@pytest.mark.parametrize(
    ("dialect", "first", "again", "other"),
    [
        (
            AnthropicMessages(),
            _claude(CLAUDE_DATE.format(date="2026-11-25"), "do it", "cff"),
            _claude(CLAUDE_DATE.format(date="2027-01-02"), "do it", "6db"),
            _claude(CLAUDE_DATE.format(date="2026-11-25"), "do that", "cff"),
        ),
        (
            OpenAIResponses(),
            _codex("2026-11-25", "Etc/UTC", "01a2", "do it"),
            _codex("2026-11-26", "Europe/Rome", "01a3", "do it"),
            _codex("2026-11-25", "Etc/UTC", "01a2", "do that"),
        ),
    ],
)
def test_another_day(dialect: Any, first: dict[str, Any], again: dict[str, Any], other: dict[str, Any]) -> None:
    digests = [dialect.read_request(body, 0, DigestMemo(b"k")).digests for body in (first, again, other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_a_date_that_no_client_puts_there_counts() -> None:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": f"report of {day}"}]} for day in ("1", "2")]
    one, two = (AnthropicMessages().read_request(body, 0, DigestMemo()).digests for body in bodies)
    assert one != two


def test_a_title_is_asked_for_on_the_side() -> None:
    assert is_aside("Generate a concise, sentence-case title (3-7 words) that captures the main topic of this session.")
    assert not is_aside("You are an interactive agent that helps users with software engineering tasks.")
