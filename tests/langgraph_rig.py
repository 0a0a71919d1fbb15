"""What the tests of `snapshotd.integrations.langgraph` share: conversations, checkpoints, and another saver to compare
with."""

from __future__ import annotations

import os
import random
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.sqlite import SqliteSaver

WORDS = (
    "the",
    "daemon",
    "takes",
    "snapshot",
    "after",
    "every",
    "call",
    "and",
    "keeps",
    "files",
    "with",
    "state",
    "lost",
)


def config(thread: str, checkpoint: str | None = None, ns: str = "") -> RunnableConfig:
    names = {"thread_id": thread, "checkpoint_ns": ns}
    return {"configurable": names if checkpoint is None else {**names, "checkpoint_id": checkpoint}}


def checkpoint(values: dict[str, Any], versions: dict[str, Any] | None = None) -> Checkpoint:
    """A checkpoint with an id that is greater than all before it."""
    return {
        "v": 4,
        "id": str(uuid6()),
        "ts": "2026-11-25T07:00:00.000000+00:00",
        "channel_values": values,
        "channel_versions": dict.fromkeys(values, 1) if versions is None else versions,
        "versions_seen": {"__input__": {}, "model": {"messages": 1}},
        "updated_channels": sorted(values),
    }


def messages(count: int, seed: int = 1) -> list[AnyMessage]:
    """Turns of a conversation, as a chat model makes them."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(f"{draw.choice(WORDS)}{draw.randrange(1000)}" for _ in range(words))

    def name() -> str:
        return str(uuid.UUID(int=draw.getrandbits(128)))

    made: list[AnyMessage] = []
    for _ in range(count):
        made.append(HumanMessage(text(20), id=name()))
        usage = {"prompt_tokens": draw.randrange(9999), "completion_tokens": draw.randrange(999)}
        made.append(AIMessage(text(60), id=f"run--{name()}", response_metadata={"model": "m-1", "token_usage": usage}))
    return made


def converse(saver: BaseCheckpointSaver[Any], said: list[AnyMessage], thread: str = "talk") -> list[RunnableConfig]:
    """Store a growing conversation as a chat graph does: for each message the write to its checkpoint, then the next
    checkpoint."""
    at = config(thread)
    found, version = [], None
    for number, message in enumerate(said):
        if found:
            saver.put_writes(at, [("messages", [message]), ("branch:to:model", None)], str(uuid.uuid4()), "~pull")
        version = saver.get_next_version(version, None)
        state = checkpoint(
            {"messages": said[: number + 1], "topic": "unchanged"},
            {"messages": version, "topic": saver.get_next_version(None, None) if number == 0 else 1},
        )
        new = {"messages": version} if number else {"messages": version, "topic": 1}
        at = saver.put(at, state, {"source": "loop", "step": number, "parents": {}}, new)
        found.append(at)
    return found


@contextmanager
def sqlite_saver(path: Path) -> Iterator[SqliteSaver]:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        yield SqliteSaver(connection)
    finally:
        connection.close()


def size_of(folder: Path) -> int:
    return sum(os.path.getsize(folder / name) for name in os.listdir(folder))


class Cipher:
    """AES-GCM, as a user of LangGraph's `EncryptedSerializer` would bring it."""

    def __init__(self) -> None:
        self._key = AESGCM(bytes(range(32)))

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        nonce = os.urandom(12)
        return "aes-gcm", nonce + self._key.encrypt(nonce, plaintext, None)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "aes-gcm"
        return self._key.decrypt(ciphertext[:12], ciphertext[12:], None)
