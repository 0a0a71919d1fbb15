"""`import langgraph` and `export langgraph`, between real savers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from snapshotd.cli.main import main
from snapshotd.integrations.langgraph import SnapshotdSaver


def say(saver: SqliteSaver | SnapshotdSaver, thread: str, text: str) -> list[str]:
    """One turn of a graph that answers with the number of messages; returns the thread's messages."""
    graph = StateGraph(MessagesState)
    graph.add_node("count", lambda state: {"messages": [HumanMessage(str(len(state["messages"])))]})
    graph.add_edge(START, "count")
    state = graph.compile(checkpointer=saver).invoke(
        {"messages": [HumanMessage(text)]}, {"configurable": {"thread_id": thread}}
    )
    return [message.content for message in state["messages"]]


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    with SqliteSaver.from_conn_string(str(tmp_path / "theirs.db")) as saver:
        say(saver, "a", "hello")
        say(saver, "b", "other")
    return f"sqlite:///{tmp_path / 'theirs.db'}"


def test_threads_come_in_and_go_out(theirs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours, back = tmp_path / "ours.db", f"sqlite:///{tmp_path / 'back.db'}"
    assert main(["import", "langgraph", "--from", theirs, "--to", str(ours), "--thread", "a", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"from": theirs, "to": str(ours), "checkpoints": 3}
    with SnapshotdSaver(ours) as saver:
        assert {one.config["configurable"]["thread_id"] for one in saver.list(None)} == {"a"}
        assert say(saver, "a", "more") == ["hello", "1", "more", "3"]
    assert main(["export", "langgraph", "--from", str(ours), "--to", back]) == 0
    with SqliteSaver.from_conn_string(str(tmp_path / "back.db")) as saver:
        assert say(saver, "a", "last") == ["hello", "1", "more", "3", "last", "5"]


def test_a_thread_that_is_there_is_refused(theirs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = str(tmp_path / "ours.db")
    assert main(["import", "langgraph", "--from", theirs, "--to", ours, "--thread", "b"]) == 0
    assert main(["import", "langgraph", "--from", theirs, "--to", ours]) == 6
    assert "thread 'b' cannot be copied" in capfd.readouterr().err
    with SnapshotdSaver(ours) as saver:
        assert {one.config["configurable"]["thread_id"] for one in saver.list(None)} == {"b"}


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("import", "langgraph", "--from", "sqlite:///none.db", "--to", "o.db"), 4, "there is no file none.db"),
        (("export", "langgraph", "--from", "none.db", "--to", "sqlite:///o.db"), 4, "there is no file none.db"),
        (("import", "langgraph", "--from", "mysql://host/db", "--to", "o.db"), 2, "is not the address of a saver"),
        (("import", "langgraph", "--from", "sqlite:///", "--to", "o.db"), 2, "is no file"),
        (("import", "langgraph", "--from", "no.txt", "--to", "o.db"), 20, "no.txt"),
        (("import", "langgraph", "--from", "sqlite:///no.txt", "--to", "o.db"), 2, "cannot be used"),
        (("import", "langgraph", "--from", "x.db"), 2, "--from URL --to FILE"),
        (("import", "bundle", "--to", "x.db"), 2, "--from URL --to FILE"),
        (("export", "box", "--thread", "t"), 2, "--from FILE --to URL"),
    ],
)
def test_mistakes_say_what_is_wrong(
    words: tuple[str, ...],
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.txt").write_text("no database, but a text of some length" * 100)
    assert main(list(words)) == code
    assert sentence in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == []


def test_a_missing_package_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "langgraph", "--from", "redis://localhost", "--to", str(tmp_path / "o.db")]) == 7
    assert "pip install langgraph-checkpoint-redis" in capfd.readouterr().err
