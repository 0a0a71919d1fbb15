"""A browser with the page, and somebody in front of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capabilities import require
from tests.e2e.support import Snap

PICTURES = os.environ.get("SNAPSHOTD_PICTURES")
"""The folder that docs/ui.md has its pictures from; `make pictures` makes them."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    require("chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


class Person:
    """Somebody in front of the page. It fails when the page logs an error."""

    def __init__(self, page: Any) -> None:
        self.page, self.problems = page, []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)

    def sees(self, text: str, within: str = "body") -> Any:
        found = self.page.locator(within).get_by_text(text).first
        found.wait_for(timeout=30_000)
        return found

    def presses(self, keys: str) -> None:
        for key in keys.split():
            self.page.keyboard.press(key)

    def clicks(self, name: str, within: str = "body") -> None:
        self.page.locator(within).get_by_role("button", name=name).first.click()

    def opens(self, trajectory: str) -> None:
        self.page.locator(".trajectory", has_text=trajectory).first.click()
        self.page.locator(".row b").first.wait_for()

    def chooses(self, number: int) -> None:
        self.page.locator(".row", has=self.page.locator(".number", has_text=re.compile(f"^{number}$"))).first.click()
        self.sees(f"call {number}", ".inspector header")

    def takes_picture(self, name: str) -> None:
        if PICTURES:
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png")


@pytest.fixture
def person(chromium: Any, own_snap: Snap) -> Iterator[Person]:
    own_snap("ls")
    server = own_snap.follow("ui", "--print")
    assert server.stdout is not None
    context = chromium.new_context(viewport={"width": 1400, "height": 820})
    try:
        person = Person(context.new_page())
        person.page.goto(server.stdout.readline().strip())
        person.page.locator("nav").wait_for()
        yield person
        assert person.problems == []
    finally:
        context.close()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
