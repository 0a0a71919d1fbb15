"""The asynchronous client is what its generator makes of the one for threads."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd import client
from snapshotd.client.aio import generate
from snapshotd.client.aio.generate import FOR_THREADS, HERE, ClientSource, module_text
from tests.own_sources import no_collection


def test_every_class_is_there_in_both_forms() -> None:
    with no_collection():
        source = ClientSource()
    both = {name for name in client.__all__ if source.has_counterpart(name)}
    assert both >= {"Sandbox", "Snapshot", "Snapshotd"}
    assert {f"Async{name}" for name in both} == {name for name in client.__all__ if name.startswith("Async")}
    for name in both:
        assert getattr(client, f"Async{name}").__name__ == f"Async{name}"


def test_what_is_there_is_what_the_generator_makes() -> None:
    with no_collection():
        made = generate.generate()
    assert {path.stem for path in made} >= {"client", "sandbox", "files", "mind", "values", "approvals", "following"}
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name} is old: run `make docs`"
    assert {path for path in HERE.glob("[a-z]*.py") if generate.is_made(path)} == set(made)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Gives the counterpart of a module with this text."""

    def make(text: str) -> str:
        sources = tmp_path / "client"
        sources.mkdir()
        for name in ("transport", "feeding", "verbs"):
            (sources / f"{name}.py").write_text((generate.SOURCES / f"{name}.py").read_text())
        (sources / "thing.py").write_text(text)
        monkeypatch.setattr(generate, "SOURCES", sources)
        found = module_text(ClientSource(), "thing")
        assert found is not None
        return ast.unparse(ast.parse(found))

    return make


HEAD = "from snapshotd.client.verbs import Verbs\n"


REQUEST, LINES = "self._transport.request('GET', '/x')", "self._transport.lines('GET', '/x')"
CONSTRUCTS = {
    f"return {REQUEST}": f"return await {REQUEST}",
    f"return list({LINES})": f"return [item async for item in {LINES}]",
    f"return ''.join({LINES})": f"return ''.join([item async for item in {LINES}])",
    "return self.other()": "return await self.other()",
    f"for line in {LINES}:\n            print(line)": f"async for line in {LINES}:",
    "with self._transport.converse('/x', 1) as talk:\n            talk.say(b'')": "async with await self._transport.converse(",
    f"with closing({LINES}) as lines:\n            print(*lines)": f"async with aclosing({LINES}) as lines:",
    "return [self.other() for _ in 'ab']": "return [await self.other() for _ in 'ab']",
}


@pytest.mark.parametrize("body", CONSTRUCTS)
def test_each_construct(made: Callable[[str], str], body: str) -> None:
    text = made(
        f"{HEAD}class Things(Verbs):\n    def thing(self):\n        {body}\n"
        f"    def other(self):\n        return {REQUEST}\n"
    )
    assert "class AsyncThings(AsyncVerbs):" in text
    assert "async def thing(self):" in text
    assert CONSTRUCTS[body] in text


def test_what_does_not_wait_stays_as_it_is(made: Callable[[str], str]) -> None:
    text = made(
        f"{HEAD}class Things(Verbs):\n    def name(self):\n        return str(1)\n"
        "    def pieces(self):\n        return self._transport.pieces('GET', '/x')\n"
    )
    assert "    def name(self):" in text
    assert "    def pieces(self):" in text, "its caller iterates, and awaits nothing"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return lambda: self._transport.request('GET', '/x')", r"thing\.py:4: a lambda cannot wait"),
        (
            "with open('x') as file, self._transport.carry('/x') as talk:\n            pass",
            r"thing\.py:4: .*two blocks",
        ),
    ],
)
def test_what_cannot_be_converted_is_an_error_with_its_place(made: Callable[[str], str], body: str, why: str) -> None:
    with pytest.raises(SyntaxError, match=why):
        made(f"{HEAD}class Things(Verbs):\n    def thing(self):\n        {body}\n")


def test_modules_without_a_counterpart_are_there() -> None:
    assert {path.stem for path in generate.SOURCES.glob("*.py")} >= FOR_THREADS
