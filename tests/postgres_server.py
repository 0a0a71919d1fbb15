"""A PostgreSQL server of a test's own: Debian's, on a unix socket, as the user postgres."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg

from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.opening import open_coordination
from snapshotd.fleet.tables import FleetTables

PROGRAMS = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/bin"))
DEADLINE_S = 60


class PostgresServer:
    """`durable`: it syncs its log at a commit, as a real one does. `close` removes everything."""

    def __init__(self, *, durable: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="snapshotd-postgres-", dir="/tmp"))
        self.port = 5432
        self._user = pwd.getpwnam("postgres") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        self._durable = durable
        os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self.folder.chmod(0o711)
        self._run("initdb", "--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8")
        self.start()

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@/{database}?host={self.folder}&port={self.port}"

    def start(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "port": str(self.port),
            "fsync": "on" if self._durable else "off",
            "max_connections": "60",
            "shared_buffers": "16MB",
            "autovacuum": "off",
            "log_min_messages": "fatal",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            [PROGRAMS / "postgres", "-D", self.folder / "data", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("ab"),
            **self._as_user(),
        )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """As a machine that loses its power would, but for what the kernel has: SIGKILL to every process of it."""
        self.send(signal.SIGSTOP)  # so that it starts no other process meanwhile
        others = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for process in (str(self._process.pid), *others):
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + DEADLINE_S
        while any(_runs(process) for process in others):  # until then they have its shared memory
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        """In PostgreSQL's fast mode: sessions are cut off."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(DEADLINE_S)

    def send(self, number: int) -> None:
        """A signal to every process of it (SIGSTOP, SIGCONT): the first one, then those that it started, each of which has a
        session of its own."""
        first = self._process.pid
        os.kill(first, number)
        for other in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(other), number)

    def ask(self, sql: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement beside all else."""
        with psycopg.connect(self.url_of(database), autocommit=True) as connection:
            cursor = connection.execute(sql)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [PROGRAMS / program, "-D", self.folder / "data", *arguments],
            check=True,
            capture_output=True,
            **self._as_user(),
        )

    def _as_user(self) -> dict[str, object]:
        return (
            {
                "user": self._user.pw_uid,
                "group": self._user.pw_gid,
                "extra_groups": [],
                "cwd": "/",
                "start_new_session": True,
            }
            if os.geteuid() == 0
            else {"cwd": "/", "start_new_session": True}
        )


@contextmanager
def new_fleet(url: str) -> Iterator[PostgresCoordination]:
    """The coordination of a fleet in a database, which gets its tables as from the first daemon that joins."""
    with closing(open_database(url)) as database:
        FleetTables(database).make()
    with open_coordination(url) as made:
        yield made


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
