"""Every setting is in one place: nothing else reads the environment, the page tells all of them, and a bad value is one
sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snapshotd.config import CLIENT, read, settings
from snapshotd.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
READERS = {
    "snapshotd/config.py": "the one place",
    "snapshotd/failpoints.py": "armed by tests only, in every process",
    "snapshotd/agent/": "runs in sandboxes, without the rest of the product",
    "snapshotd/hooks/send.py": "runs as a hook of an agent, which names its folder in the environment",
    "snapshotd/runtime/keeper_main.py": "a program of one file, which passes its environment on",
    "snapshotd/engine/host/system_packages.py": "a program of one file for any Python, which passes its environment on",
    "snapshotd/daemon/server.py": "NOTIFY_SOCKET is taken out of the environment, so that no child has it",
    "snapshotd/trees/git.py": "git gets the user's environment, without what would lead it elsewhere",
    "snapshotd/cli/commands/inspection/ui.py": "DISPLAY and WAYLAND_DISPLAY say that a browser can be shown",
    "snapshotd/integrations/mini_swe_agent/environment.py": "forward_env of mini-swe-agent names the variables that are passed on",
    "snapshotd/integrations/otel/spans.py": "OTEL_ variables, as every exporter of OpenTelemetry reads them",
    "snapshotd/cli/reference.py": "takes COLUMNS out, which click would read",
}
"""Files or folders that may touch the environment, and why."""


def test_nothing_else_reads_the_environment() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "snapshotd").rglob("*.py")}
    found = {
        file for file, text in files.items() if re.search(r"\b(os|posix)\.(environb?|getenvb?)\b|import environ", text)
    }
    assert {file for file in found if not file.startswith(tuple(READERS))} == set()
    assert {reader for reader in READERS if not any(file.startswith(reader) for file in found)} == set()


def test_the_page_has_every_setting() -> None:
    """Variable, default, range and meaning, in the order of the dataclass."""
    rows = [
        f"| `{item.metadata['variable']}` | {item.metadata['shown']} | {item.metadata['allowed']} | {item.metadata['meaning']} |"
        for item in settings()
    ]
    table = PAGE.read_text().partition("## Settings")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == rows


def test_defaults_are_what_they_are_said_to_be() -> None:
    for item in settings():
        if item.default and not isinstance(item.default, frozenset):
            shown = f"{item.default:g}" if isinstance(item.default, float) else str(item.default)
            assert item.metadata["shown"].strip("`").split(" ")[0] == shown, item.name


def test_the_page_has_every_variable_of_the_product() -> None:
    named = {
        name
        for path in (ROOT / "snapshotd").rglob("*.py")
        for name in re.findall(r"\bSNAPSHOTD_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert {name for name in named if f"`{name}`" not in PAGE.read_text()} == set()


def test_an_empty_environment_gives_the_defaults() -> None:
    found = read(environ={"SNAPSHOTD_WARM": "", "SNAPSHOTD_LAYER_BUDGET": ""})
    assert (found.warm_containers, found.layer_budget_bytes, found.forks_at_once, found.given) == (2, None, 8, set())


def test_values_are_read() -> None:
    found = read(environ={"SNAPSHOTD_WARM": "0", "SNAPSHOTD_LAYER_BUDGET": "0", "SNAPSHOTD_RECONNECT_S": "1.5"})
    assert (found.warm_containers, found.layer_budget_bytes, found.reconnect_s) == (0, 0, 1.5)
    assert found.given == {"warm_containers", "layer_budget_bytes", "reconnect_s"}


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("SNAPSHOTD_WARM", "two", "a whole number from 0 to 64"),
        ("SNAPSHOTD_WARM", "-1", "a whole number from 0 to 64"),
        ("SNAPSHOTD_WARM", "9" * 5000, "a whole number from 0 to 64"),
        ("SNAPSHOTD_LAYER_BUDGET", "10g", "a whole number from 0 to"),
        ("SNAPSHOTD_FORKS_AT_ONCE", "0", "a whole number from 1 to 256"),
        ("SNAPSHOTD_OUTPUT_LIMIT", "²", "a whole number from 1048576 to"),
        ("SNAPSHOTD_RECONNECT_S", "nan", "a number of seconds, 0 or more"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(environ={variable: value})
    assert raised.value.message.startswith(f"{variable} is {value[:80]!r}, but it takes {allowed}")


def test_a_client_does_not_mind_the_daemons_settings() -> None:
    found = read(CLIENT, {"SNAPSHOTD_WARM": "two", "SNAPSHOTD_SOCKET": "/s"})
    assert (found.warm_containers, found.socket) == (2, "/s")


def test_no_password_is_shown() -> None:
    found = read(environ={"DOCKER_HOST": "tcp://user:secret@elsewhere:2375", "SNAPSHOTD_STORE": "s3://bucket/prefix"})
    shown = found.without_secrets()
    assert (shown["DOCKER_HOST"], shown["SNAPSHOTD_STORE"]) == ("tcp://elsewhere:2375", "s3://bucket/prefix")
    assert list(shown) == [item.metadata["variable"] for item in settings() if item.name != "token"]
