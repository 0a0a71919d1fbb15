"""The import graph is a contract, and these tables are where it is written down.

Imports count wherever they stand: at the top, inside functions, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.own_sources import trees, walk

ROOT = Path(__file__).parents[2] / "snapshotd"

RANKS: tuple[tuple[str, ...], ...] = (
    ("cli", "client", "integrations", "page"),
    ("daemon",),
    ("engine",),
    ("fuse", "fleet"),
    ("layers", "formats", "trees", "repo", "catalog", "runtime", "images", "secrets"),
    ("store", "gateway", "egress", "sqlite", "serving"),
    ("kernel",),
    ("api",),
)
"""Packages from high to low (`sqlite` and `serving` are single modules). One may import any of a lower rank, none of a higher one,
and of its own rank only itself."""

EXTRA_ARROWS: dict[str, tuple[str, ...]] = {
    "layers": ("trees",),  # a stack is one way to read a tree
    "formats": ("trees",),  # an archive is written from a tree, and made into one
    "trees": ("repo",),  # layers are archived to the repository and come back from it
    "images": ("layers", "formats", "trees"),  # an image is ingested like any other foreign tree
    "cli": (
        "client",
        "integrations",
        "page",
    ),  # every command goes through the client; threads of LangGraph need no daemon
    "page": ("client",),  # the wire: answers with frames, and conversations
    "integrations": ("client",),  # what has to do with a sandbox
}
"""Package to the other packages of its own rank that it may import."""

FAR_ARROWS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cli", "engine"): ("base", "host.doctor", "host.integrations"),  # the doctor works where no daemon can
    ("client", "engine"): ("base",),
    ("daemon", "engine"): ("base", "engine", "experiments.base", "records"),  # its words, and its services
    ("client", "fleet"): (
        "base",
        "forgetting",
        "opening",
        "places",
    ),  # which nodes there are, and which of them gets a fork
    ("client", "trees"): ("git", "three_way"),  # the rules of a merge, for a folder of the user
    ("client", "store"): ("base", "open"),  # a cache of bundles has the address of a store
    ("integrations", "engine"): ("host.integrations",),  # the version of the package that each is for
    ("integrations", "sqlite"): ("Database", "Form", "Row", "Value", "create", "creating"),  # files without a daemon
    ("integrations", "serving"): ("HttpServer", "listen_on"),  # servers of their own, beside the daemon's
    ("page", "serving"): ("BoundedProtocol", "HEAD_S", "HttpServer", "listen_on"),
    ("cli", "fleet"): ("base", "forgetting", "opening", "places"),  # the tables are looked at without a daemon
    ("fleet", "catalog"): ("database", "postgres.catalog", "postgres.driver"),  # its tables stand beside the catalog's
    ("engine", "store"): ("base", "open"),  # the doctor asks a node's bucket
    ("engine", "images"): ("base", "store"),
    ("engine", "repo"): ("base", "spool", "fleet.blocks.measure"),  # and measures its cache, without a daemon
    ("engine", "secrets"): ("base", "configured", "redactor", "stream", "vault"),
}
"""(importer, imported): the only modules it may import. The other side of the socket knows the words of the engine, not
the engine."""

ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "engine": (
        ("engine",),
        ("experiments",),
        ("services", "folder_expiry", "node"),
        ("share",),
        ("history",),
        ("runs", "host", "folders"),
        ("transfer", "journal", "held"),
        ("sandbox",),
        ("search", "storage"),
        ("protocol",),
        (
            "base",
            "caller",
            "context",
            "events",
            "identity",
            "markers",
            "ownership",
            "pauses",
            "pins",
            "records",
            "requests",
            "secrecy",
            "watch",
        ),
    ),
    "repo": (("fleet",), ("upkeep",), ("writing",), ("reading",), ("format", "spool", "spool_format"), ("base", "key")),
    "daemon": (
        (
            "children",
            "hook_places",
            "hooks",
            "host",
            "instances",
            "joining",
            "library",
            "lock",
            "logs",
            "server",
            "wiring",
        ),
        ("http",),
        ("access",),
    ),
    "cli": (
        ("main", "reference"),
        ("habits",),
        ("commands",),
        (
            "background",
            "changes",
            "command",
            "documents",
            "each",
            "follow",
            "forest",
            "github",
            "langgraph",
            "progress",
            "retention",
            "snapshots",
            "text",
            "values",
            "waiting",
        ),
    ),
}
"""Package to its folders and its own modules, from high to low. One may import what stands lower, and its own folder;
modules of one line may import each other."""

MOST_MODULES = 20
"""A folder with more is no room where something is found at a glance."""

FOR_ALL = ("types", "terms", "network", "errors", "failpoints", "config", "junit", "scores", "service", "at_once")
"""Modules at the top that everybody may import, and that import only each other."""

INTERFACES = ("store", "repo", "catalog", "runtime", "images", "gateway", "engine")
"""Packages whose `base` is all that other packages may import (`layers` and `kernel` are modules of functions)."""

ENTRY = "__main__.py"
"""`python -m snapshotd`: starts the command line and is free to name it."""

WIRING = ("daemon/wiring.py", "daemon/children.py", "daemon/joining.py")
"""The composition roots, of the daemon and of its child processes: the only modules that may name concrete classes of
any package."""

SELF_CONTAINED = ("agent", "hooks")
"""Packages that import the standard library and themselves, and that nobody imports: they run inside sandboxes, and as
hooks of agents."""

TEST_ONLY = ("testing",)
"""Packages that product code never imports; they may import anything but pytest."""

OWNERS: dict[str, tuple[str, ...]] = {
    "docker": ("runtime/", "images/docker.py"),
    "apsw": ("sqlite.py",),
    "langchain_core": ("integrations/langgraph/",),  # comes with langgraph-checkpoint
    "langgraph": ("integrations/langgraph/",),
    "ormsgpack": ("integrations/langgraph/",),  # comes with langgraph-checkpoint
    "pyfastcdc": ("repo/", "integrations/langgraph/"),
    "pyfuse3": ("fuse/",),
    "trio": ("fuse/",),  # what pyfuse3 runs on
    "psycopg": ("catalog/postgres/",),
    "boto3": ("store/s3.py",),
    "botocore": ("store/s3.py",),  # comes with boto3
    "ahocorasick_rs": ("secrets/needles.py",),
    "blake3": ("repo/", "secrets/key.py", "integrations/langgraph/"),
    "cryptography": ("secrets/vault.py", "client/bundles/sealing.py", "daemon/access/certificate.py"),
    "zstandard": ("repo/", "images/decompress.py", "images/shared.py", "integrations/langgraph/"),
    "xxhash": ("repo/",),
    "h11": ("gateway/", "egress/web.py", "serving.py"),
    "python_multipart": ("integrations/e2b/inside/transfers.py",),
    "websockets": ("integrations/e2b/traffic.py",),
    "httpx2": ("gateway/forward.py", "page/passing.py", "integrations/e2b/traffic.py"),
    "re2": ("engine/folders/ignore.py",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "fastapi": ("daemon/",),
    "agents": ("integrations/openai_agents/",),  # is openai-agents
    "claude_agent_sdk": ("integrations/claude_agent/",),
    "deepagents": ("integrations/deepagents/",),
    "opentelemetry": ("integrations/otel/",),
    "inspect_ai": ("integrations/inspect_ai/",),
    "nemo_gym": ("integrations/nemo_gym/",),
    "minisweagent": ("integrations/mini_swe_agent/",),
    "swerex": ("integrations/swe_rex/",),
    "mcp": ("integrations/mcp/",),
    "mcp_types": ("integrations/mcp/",),  # comes with mcp
    "uvicorn": ("daemon/", "serving.py"),
    "starlette": ("daemon/", "page/", "integrations/mcp/", "integrations/e2b/", "serving.py"),  # comes with fastapi
    "pydantic": (
        "daemon/",
        "engine/transfer/trajectories/",
        "engine/experiments/",
        "integrations/mcp/",
        "integrations/openai_agents/",
        "integrations/inspect_ai/",
        "integrations/mini_swe_agent/",
    ),  # comes with fastapi
    "anyio": ("daemon/", "integrations/mcp/"),  # comes with fastapi
    "ray": ("client/fleet/ray.py",),
    "requests": ("runtime/", "images/docker.py", "images/registry.py"),  # what docker raises; comes with it
}
"""Third-party package to the files (or folders, with a slash) that may import it. What is not listed is imported by
nobody."""


def imported_names(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Absolute dotted names that a module of `package` imports; `from a import b` gives a.b."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *(node.module.split(".") if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violation(file: str, name: str) -> str | None:
    """What is wrong when `file` (relative to the package) imports `name`; None if it may."""
    top, *inside = name.split(".")
    if top != "snapshotd":
        return foreign_violation(file, top)
    own = file.split("/")[0].removesuffix(".py")
    target, module = (inside[0] if inside else ""), ".".join(inside[1:])
    if target == own:
        return room_violation(file, own, module)
    if own in TEST_ONLY or (file == ENTRY and target == "cli"):
        return None
    if own in SELF_CONTAINED:
        return f"{file}: {own} may import only the standard library and itself, not {name}"
    if target in TEST_ONLY or target in SELF_CONTAINED:
        return f"{file}: product code may not import {target}"
    if target in FOR_ALL or target in ("", "__version__"):
        return None
    if own in FOR_ALL or own == "__init__":
        return f"{file}: {own} stands at the bottom and may not import {name}"
    return arrow_violation(file, own, target, module)


def room_violation(file: str, package: str, module: str) -> str | None:
    """What is wrong when `file` imports `module` of its own package."""
    if package not in ROOMS or file in WIRING or "/" not in file:
        return None
    rank = {room: number for number, rooms in enumerate(ROOMS[package]) for room in rooms}
    own, target = file.split("/")[1].removesuffix(".py"), module.split(".")[0]
    if own == "__init__" or target not in rank or own == target:
        return None if own == "__init__" or own in rank else f"{file}: {own} is in no line of ROOMS: give it one"
    if own not in rank:
        return f"{file}: {own} is in no line of ROOMS: give it one"
    return (
        None if rank[own] <= rank[target] else f"{file}: {package}/{own} may not import {target}, which stands above it"
    )


def foreign_violation(file: str, top: str) -> str | None:
    if top in sys.stdlib_module_names:
        return None
    if file.split("/")[0] in SELF_CONTAINED:
        return f"{file}: only the standard library may be imported here, not {top}"
    if file.split("/")[0] in TEST_ONLY:
        return f"{file}: it runs without a test runner ({top})" if top in ("pytest", "hypothesis") else None
    if any(file == owner or (owner.endswith("/") and file.startswith(owner)) for owner in OWNERS.get(top, ())):
        return None
    return f"{file}: {top} may only be imported in {' and '.join(OWNERS.get(top, ('no file: it is not in OWNERS',)))}"


def arrow_violation(file: str, own: str, target: str, module: str) -> str | None:
    rank = {package: number for number, packages in enumerate(RANKS) for package in packages}
    if own not in rank or target not in rank:
        return f"{file}: {own if own not in rank else target} has no rank: give it one"
    if file in WIRING and rank[target] > rank[own]:
        return None
    if rank[target] < rank[own]:
        return f"{file}: {own} may not import {target}, which stands above it"
    if rank[target] == rank[own] and target not in EXTRA_ARROWS.get(own, ()):
        return f"{file}: {own} may not import {target}, which stands beside it"
    if (own, target) in FAR_ARROWS:
        allowed = FAR_ARROWS[own, target]
        return None if starts_with(module, allowed) else f"{file}: {own} may import only {allowed} of {target}"
    if target == "api":
        return None  # both sides of the socket share it, and so may the engine behind it
    if own in RANKS[0] and rank[target] > rank["daemon"]:
        return f"{file}: {own} may not reach past the daemon to {target}"
    if target in INTERFACES and not starts_with(module, ("base",)):
        return f"{file}: import snapshotd.{target}.base, not {module or 'the package'}; only {' and '.join(WIRING)} name concrete classes"
    return None


def starts_with(module: str, allowed: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of these modules, or something in one."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def violations() -> list[str]:
    found = []
    for file, tree in trees().items():
        package = ("snapshotd", *file.split("/")[:-1])
        names = sorted(set(imported_names(tree, package)))
        found += [problem for name in names if (problem := violation(file, name)) is not None]
    return found


def test_imports_follow_the_arrows() -> None:
    assert violations() == []


def test_no_folder_is_crowded() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in ROOT.rglob("*.py")}}
    assert {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_every_package_is_in_the_tables() -> None:
    """A package that is in no table would be checked by nothing."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    known = {package for rank in RANKS for package in rank} | {*SELF_CONTAINED, *TEST_ONLY}
    assert packages <= known
    assert {path.stem for path in ROOT.glob("*.py")} <= {*FOR_ALL, "sqlite", "serving", "__init__", "__main__"}


@pytest.mark.parametrize(
    ("file", "name", "allowed"),
    [
        ("engine/sandbox/step.py", "snapshotd.catalog.base.Catalog", True),
        ("engine/sandbox/step.py", "snapshotd.catalog.sqlite.SqliteCatalog", False),
        ("engine/sandbox/step.py", "snapshotd.layers.pivot.pivot", True),
        ("catalog/sqlite.py", "snapshotd.sqlite.Database", True),
        ("catalog/postgres/driver.py", "psycopg", True),
        ("catalog/base.py", "psycopg", False),
        ("sqlite.py", "snapshotd.catalog.schema", False),
        ("engine/sandbox/step.py", "snapshotd.daemon.http.api", False),
        ("daemon/wiring.py", "snapshotd.catalog.sqlite.SqliteCatalog", True),
        ("daemon/wiring.py", "snapshotd.cli.main", False),
        ("daemon/http/api.py", "snapshotd.engine.engine.Engine", True),
        ("daemon/http/api.py", "snapshotd.engine.runs.sessions", False),
        ("images/build.py", "snapshotd.formats.ingest", True),
        ("formats/ingest.py", "snapshotd.images.base", False),
        ("runtime/runc.py", "snapshotd.trees.base", False),
        ("kernel/files.py", "snapshotd.trees.base", False),
        ("kernel/files.py", "snapshotd.errors.NotFound", True),
        ("api/record.py", "snapshotd.types", True),
        ("api/record.py", "snapshotd.engine.base.Engine", False),
        ("api/record.py", "pydantic", False),
        ("client/verbs.py", "snapshotd.api.operations", True),
        ("types.py", "snapshotd.kernel.files", False),
        ("images/build.py", "snapshotd.config.read_variables", True),
        ("config.py", "snapshotd.store.base", False),
        ("cli/commands/running/run.py", "snapshotd.client", True),
        ("client/sync.py", "snapshotd.cli", False),
        ("cli/commands/running/run.py", "snapshotd.catalog.base", False),
        ("cli/commands/running/run.py", "snapshotd.engine.sandbox.step", False),
        ("agent/calls.py", "snapshotd.types", False),
        ("agent/calls.py", "snapshotd.agent.session", True),
        ("agent/calls.py", "json", True),
        ("agent/calls.py", "requests", False),
        ("engine/sandbox/step.py", "snapshotd.testing.provider", False),
        ("engine/sandbox/step.py", "snapshotd.agent", False),
        ("testing/provider.py", "snapshotd.catalog.base", True),
        ("testing/provider.py", "pytest", False),
        ("runtime/docker.py", "docker", True),
        ("images/docker.py", "docker.errors", True),
        ("images/build.py", "docker", False),
        ("catalog/sqlite.py", "apsw", False),
        ("engine/sandbox/step.py", "numpy", False),
        ("engine/sandbox/step.py", "snapshotd.gateway.base.Gateway", True),
        ("engine/sandbox/step.py", "snapshotd.gateway.server.GatewayServer", False),
        ("gateway/server.py", "snapshotd.store.base", False),
        ("gateway/forward.py", "httpx2", True),
        ("engine/sandbox/step.py", "httpx2", False),
        ("engine/sandbox/step.py", "snapshotd.secrets.redactor.Funnel", True),
        ("engine/sandbox/step.py", "snapshotd.secrets.key.load_key", False),
        ("secrets/vault.py", "snapshotd.catalog.base", False),
        ("integrations/langgraph/saver.py", "snapshotd.sqlite.Database", True),
        ("integrations/langgraph/saver.py", "snapshotd.kernel.files", False),
        ("integrations/langgraph/saver.py", "snapshotd.client.Sandbox", True),
        ("client/sandbox.py", "snapshotd.integrations.langgraph", False),
        ("new/thing.py", "snapshotd.kernel.files", False),
    ],
)
def test_the_rules_mean_what_they_say(file: str, name: str, allowed: bool) -> None:
    assert (violation(file, name) is None) is allowed


def test_every_form_of_import_is_seen() -> None:
    source = """
import a.b
from c import d as e
from . import f
from .g import h
from .. import i
def function():
    import j
if TYPE_CHECKING:
    from k import l
"""
    found = set(imported_names(ast.parse(source), ("snapshotd", "repo")))
    assert found == {"a.b", "c.d", "snapshotd.repo.f", "snapshotd.repo.g.h", "snapshotd.i", "j", "k.l"}


def test_no_test_imports_another() -> None:
    """What several need is in a module that is none: so tests can be moved, and run alone."""
    files = sorted((ROOT.parent / "tests").rglob("*.py"))
    assert len(files) > 200
    imported = re.compile(r"^\s*(?:from|import) ((?:tests\.[\w.]*)?\btest_\w+)", re.MULTILINE)
    assert [(str(path), name) for path in files for name in imported.findall(path.read_text())] == []
