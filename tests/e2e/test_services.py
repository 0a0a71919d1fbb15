"""Services come back: a real database in a sandbox, and a small server, in forks, rewinds, resumes and after kills."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, ServiceOptions, Snapshotd
from tests import capabilities, way
from tests.e2e.support import Snap, wait_until

SERVER = "echo began >> starts; exec python3 -u -m http.server 8000"
WEB = ServiceOptions("web", port=8000)
POSTGRES = Path("/usr/lib/postgresql/15")
DATABASE = ServiceOptions("db", ready="/usr/lib/postgresql/15/bin/pg_isready -q -h /tmp", port=5432)
PSQL = "/usr/lib/postgresql/15/bin/psql -h /tmp -U postgres -qAt -v ON_ERROR_STOP=1"


def sandbox_of(snap: Snap, runtime: str, *options: str) -> Sandbox:
    box, _ = snap.create("--runtime", runtime, *options)
    return Sandbox.connect(box, client=Snapshotd(snap.state_dir))


def states(sandbox: Sandbox) -> dict[str, str]:
    """The newest state of each service."""
    return {str(one.info.service): str(one.info.service_state) for one in sandbox.commands() if one.info.service}


def fetched(sandbox: Sandbox, path: str) -> bytes:
    """The answer of the server, from outside of the sandbox, at once."""
    with sandbox.port("web") as port, urllib.request.urlopen(f"http://{port.address}/{path}", timeout=30) as answer:
        data: bytes = answer.read()
        return data


@pytest.mark.timeout(300)
def test_a_server_comes_back(own_snap: Snap, runtime: str) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, runtime)
    sandbox.exec("echo 0 > number")
    before = sandbox.head()
    command = sandbox.exec(SERVER, service=WEB)
    assert sandbox.head().info.method == way.COPY, "it was alive at its own declaration"
    one = sandbox.exec("echo 1 > number")
    sandbox.exec("echo 2 > number")
    assert fetched(sandbox, "number") == b"2\n"
    for fork in Snapshotd(snap.state_dir).fork(one.snapshot_id, 2).trajectories:
        assert fetched(Sandbox.connect(fork.id, client=Snapshotd(snap.state_dir)), "number") == b"1\n"
    done = Snapshotd(snap.state_dir).exec_snapshot(
        one.snapshot_id,
        ["python3", "-c", "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/number').read())"],
    )
    assert done.exit_code == 0, "a throw-away fork has it, too"
    sandbox.rewind(one.snapshot_id)
    assert fetched(sandbox, "number") == b"1\n"
    sandbox.undo()
    assert fetched(sandbox, "number") == b"2\n"
    sandbox.rewind(before)
    assert states(sandbox) == {"web": "stopped"}
    sandbox.undo()
    snap.kill_daemon()
    assert states(sandbox) == {"web": "ready"}, "it goes on at the next daemon"
    assert fetched(sandbox, "starts").count(b"began") == 1 + sandbox.exec("cat starts").stdout.count("began") - 1
    running = [one.info for one in sandbox.commands() if one.info.status == "running"]
    assert len(running) == 1
    assert running[0].id != command.id
    snap.crash()
    assert sandbox.exec("cat number").stdout == "2\n"
    assert fetched(sandbox, "number") == b"2\n"
    table = snap("ps", sandbox.id).stdout
    assert re.search(r"SERVICE\s+STATE\s+RESTARTS", table)
    assert re.search(r"web\s+ready\s+0", table)
    assert "GET /number" in snap("logs", sandbox.id, "web").stderr
    assert snap("kill", "--remove", sandbox.id, "web").stdout.strip() == sandbox.head().id
    for one_more in sandbox.head().fork(1):
        assert states(one_more) == {}
        one_more.remove(force=True)


@pytest.mark.long  # a sandbox says so: unit/daemon/test_services.py
@pytest.mark.runc
def test_a_rewind_says_at_once_which_did_not_come_back(own_snap: Snap) -> None:
    box, _ = own_snap.create("--runtime", "runc")
    own_snap(
        "exec",
        "--detach",
        "--service",
        "web",
        "--ready",
        "test ! -e broken",
        "--ready-timeout",
        "2",
        box,
        "--",
        "sleep",
        "1000",
    )
    whole = own_snap.json("log", box)[-1]["id"]
    own_snap("exec", box, "--", "touch", "broken")
    broken = own_snap.json("log", box)[-1]["id"]
    assert "did not come back" not in own_snap("rewind", box, whole).stderr
    said = own_snap("rewind", box, broken).stderr
    assert re.search(rf"the service web did not come back: it .*; `snapshotd logs {box[:12]} web` has its output", said)
    assert "did not come back" not in own_snap("undo", box).stderr
    own_snap("rm", "--force", box)


@pytest.mark.long  # a daemon that is killed at no such point: test_a_server_comes_back
@pytest.mark.runc
@pytest.mark.parametrize(
    "point",
    [
        "engine.service.declared",
        *(
            pytest.param(f"engine.{name}", marks=pytest.mark.long)
            for name in ("service.ready", "command.begun", "step.sealed")
        ),
    ],
)
def test_killed_at_a_failpoint(own_snap: Snap, point: str) -> None:
    """It is declared, and runs once; or it is not there at all, and can be declared again."""
    snap = own_snap
    sandbox = sandbox_of(snap, "runc")
    sandbox.exec("exec sleep 1000", background=True)  # the sandbox outlives its daemon
    snap.kill_daemon()
    armed = Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": point})
    words = ("exec", "--detach", "--service", "web", "--port", "8000", sandbox.id, "--", "sh", "-c", SERVER)
    begun = armed(*words, code=None)
    log = snap.state_dir / "daemon.log"
    wait_until(lambda: f"failpoint {point} reached" in log.read_text(), "it is reached")
    declared = [one.info.tool.name for one in sandbox.snapshots()].count("service")
    assert declared == (point == "engine.service.declared")
    if begun.returncode != 0:
        assert not declared, "else it is told, asked again"
        snap(*words)
    assert states(sandbox)["web"] == "ready"
    running = [one.info for one in sandbox.commands() if one.info.status == "running" and one.info.service]
    assert len(running) == 1
    (fork,) = sandbox.head().fork()
    assert fetched(fork, "starts").count(b"began") == sandbox.exec("cat starts").stdout.count("began") + 1
    fork.remove(force=True)
    sandbox.remove(force=True)


AGENT = """
import os, time, urllib.request
from snapshotd.agent import tool

@tool
def look(number):
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
    return urllib.request.urlopen("http://127.0.0.1:8000/log").read().decode()

for number in range(4):
    print(look(number).split(), flush=True)
    if number == 2:
        while not os.path.exists("/workspace/go"):
            time.sleep(0.02)
"""


@pytest.mark.long  # without an agent: test_a_server_comes_back
@pytest.mark.timeout(300)
def test_an_agent_that_is_resumed_or_forked_has_it_before_it_goes_on(
    own_snap: Snap, runtime: str, tmp_path: Path
) -> None:
    snap = own_snap
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "services.toml").write_text(
        '[services.web]\ncommand = "exec python3 -u -m http.server 8000"\nport = 8000\n'
    )
    with snap.start(
        "run", "--runtime", runtime, "--name", "looks", "--services", tmp_path / "services.toml", tmp_path / "agent.py"
    ) as run:
        assert run.stdout is not None
        for number in range(3):
            assert run.stdout.readline() == f"{[str(one) for one in range(number + 1)]}\n"
        snap.crash()
        run.communicate(timeout=120)
    looks = Sandbox.connect("looks", client=Snapshotd(snap.state_dir))
    (fork,) = looks.head().fork(resume=True)
    looks.resume()
    for line in (fork, looks):
        wait_until(lambda line=line: replayed(line) == 3, "it has met what is recorded")  # type: ignore[misc]
        line.exec("touch go")
        assert line.wait().exit_code == 0
        assert line.head().cat("/workspace/log") == b"0\n1\n2\n3\n"
    fork.remove(force=True)
    looks.remove(force=True)


def replayed(sandbox: Sandbox) -> int:
    return sum(event["event"] == "replayed" for event in sandbox.events(follow=False))


# -- PostgreSQL ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's PostgreSQL as an archive for a sandbox: programs, what they load, and what they read."""
    capabilities.require("postgres")
    programs = [POSTGRES / "bin" / name for name in ("postgres", "initdb", "psql", "pg_isready")]
    modules = [path for path in (POSTGRES / "lib").glob("*.so") if not path.name.startswith("llvmjit")]
    loaded = subprocess.run(["ldd", *programs, *modules], check=True, capture_output=True, text=True).stdout
    libraries = {Path(found) for found in re.findall(r"=> (/\S+)", loaded)}
    wanted = [
        *programs,
        *modules,
        *libraries,
        *(path.resolve() for path in libraries),
        Path("/usr/share/postgresql/15"),
    ]
    zones = [path for path in (Path("/usr/share/zoneinfo/UTC"), Path("/usr/share/zoneinfo/Etc")) if path.exists()]
    archive = tmp_path_factory.mktemp("postgres") / "postgres.tar"
    subprocess.run(["tar", "-cf", archive, "-C", "/", *(str(path)[1:] for path in (*wanted, *zones))], check=True)
    return archive


@pytest.mark.timeout(600)
@pytest.mark.long
def test_postgresql_answers_with_the_rows_of_the_moment(own_snap: Snap, runtime: str, postgres: Path) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, runtime, "--name", "shop")
    snap("cp", postgres, f"{sandbox.id}:/tmp/postgres.tar")
    sandbox.exec("tar -C / --skip-old-files -xf /tmp/postgres.tar && rm /tmp/postgres.tar && ldconfig", check=True)
    sandbox.exec(
        "echo postgres:x:70:70::/var/lib/pg:/bin/sh >> /etc/passwd; echo postgres:x:70: >> /etc/group; "
        "mkdir -p /var/lib/pg && chown 70:70 /var/lib/pg",
        check=True,
    )
    sandbox.exec(f"{POSTGRES}/bin/initdb -D /var/lib/pg -U postgres --locale=C -E UTF8", user="postgres", check=True)
    server = ["postgres", "-D", "/var/lib/pg", "-k", "/tmp", "-c", "listen_addresses=127.0.0.1"]
    sandbox.exec([f"{POSTGRES}/bin/{server[0]}", *server[1:]], user="postgres", service=DATABASE)
    sandbox.exec(f"{PSQL} -c 'create table row (number int primary key)'", check=True)
    taken = [sandbox.exec(f"{PSQL} -c 'insert into row values ({number})'", check=True) for number in range(5)]
    client = Snapshotd(snap.state_dir)
    forks = [Sandbox.connect(one.id, client=client) for one in client.fork(taken[2].snapshot_id, 5).trajectories]
    for number, fork in enumerate(forks):
        assert rows(fork) == [0, 1, 2], "the rows of that moment"
        fork.exec(f"{PSQL} -c 'insert into row values ({100 + number})'", check=True)
    assert [rows(fork)[3:] for fork in forks] == [[100], [101], [102], [103], [104]], "each has its own"
    sandbox.rewind(taken[1].snapshot_id)
    assert rows(sandbox) == [0, 1]
    sandbox.undo()
    assert rows(sandbox) == [0, 1, 2, 3, 4]
    snap.kill_daemon()
    assert rows(sandbox) == [0, 1, 2, 3, 4], "it goes on at the next daemon"
    snap.crash()
    sandbox.exec("true")
    assert rows(sandbox) == [0, 1, 2, 3, 4]
    assert states(sandbox)["db"] == "ready"
    forks[0].exec("true")
    assert rows(forks[0])[:3] == [0, 1, 2]
    under_load(snap, sandbox)
    for one in (*forks, sandbox):
        one.remove(force=True)


def under_load(snap: Snap, sandbox: Sandbox) -> None:
    """Snapshots are taken while a client writes without a pause: the database of each has a whole prefix of what it wrote."""
    writer = sandbox.exec(
        f'for n in $(seq 1000 9000); do echo "insert into row values ($n);"; done | {PSQL}', background=True
    )
    wait_until(lambda: len(rows(sandbox)) > 50, "it writes")
    moments = [sandbox.snapshot() for _ in range(3)]
    writer.kill()
    counts = []
    for moment in moments:
        (fork,) = moment.fork()
        found = [number for number in rows(fork) if number >= 1000]
        assert found == list(range(1000, 1000 + len(found))), "no row is missing among them"
        counts.append(len(found))
        fork.remove(force=True)
    assert counts == sorted(counts)
    assert counts[0] > 0


def rows(sandbox: Sandbox) -> list[int]:
    """A client outside of the sandbox asks the database, at once."""
    with sandbox.port("db") as port:
        host, _, number = port.address.partition(":")
        query = [
            "psql",
            "-h",
            host,
            "-p",
            number,
            "-U",
            "postgres",
            "-qAt",
            "-c",
            "select number from row order by number",
        ]
        done = subprocess.run(
            [str(POSTGRES / "bin/psql"), *query[1:]], check=True, capture_output=True, text=True, timeout=60
        )
        return [int(line) for line in done.stdout.split()]
