"""What is built on E2B's SDK, as it comes from PyPI, with the sandboxes of `snapshotd serve --e2b`: no network, scripted models."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capabilities import python312
from tests.e2b_rig import Served, served
from tests.e2e.hello_server import own_address
from tests.e2e.model_rig import INSTALL_TIMEOUT_S, KEY, bash, provider
from tests.e2e.support import Snap
from tests.kept import cached

pytestmark = [pytest.mark.long, pytest.mark.runc, pytest.mark.timeout(1800)]
PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture(scope="module")
def server(own_snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(own_snap, tmp_path_factory.mktemp("e2b"), "--network", "none") as running:
        yield running


def python_with(name: str, base: str, *packages: str) -> Path:
    """The Python of an environment with these packages of PyPI, which is kept from run to run. `base`: the Python that makes it."""

    def install(folder: Path) -> None:
        subprocess.run([base, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", *packages]
        subprocess.run(pip, check=True, timeout=INSTALL_TIMEOUT_S)

    return cached(f"venv-{name}", "\n".join(packages), install) / "bin" / "python"


def run(server: Served, tmp_path: Path, *command: str | Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **server.env}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def calls(snap: Snap, sandbox: str) -> list[tuple[str, str]]:
    return [(step["tool"]["name"], step["tool"]["status"]) for step in snap.json("log", sandbox)]


def test_openais_agents_sdk(server: Served, own_snap: Snap, tmp_path: Path) -> None:
    python = python_with("openai-e2b", sys.executable, "openai-agents[e2b]==0.24.0")
    told = json.loads(run(server, tmp_path, python, PROGRAMS / "e2b_agents.py").splitlines()[-1])
    made = calls(own_snap, told["sandbox"])
    assert ("exec", "failed") in made
    log = own_snap.json("log", told["sandbox"])
    changed = [step["id"] for step in log if "notes" in json.dumps(step["tool"]["arguments"])]
    where = f"{told['root']}/notes"
    assert own_snap("cat", f"{changed[0]}:{where}").stdout == "one\n"
    assert own_snap("cat", f"{changed[-1]}:{where}").stdout == "one\ntwo\n"


def test_the_runtime_of_verifiers(server: Served, own_snap: Snap, tmp_path: Path) -> None:
    python = python_with("verifiers", python312(), "verifiers==0.4.0", "e2b==2.56.0")
    told = json.loads(run(server, tmp_path, python, PROGRAMS / "e2b_verifiers.py", "default").splitlines()[-1])
    assert own_snap("cat", f"{told['sandbox']}:/app/made").stdout == "made\n"


@contextlib.contextmanager
def files_of(folder: Path) -> Iterator[str]:
    """A server on an address of this machine with the files of a folder: its host and port."""

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer((own_address(), 0), Files) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield "{}:{}".format(*listening.server_address[:2])
        listening.shutdown()


def wheels() -> Path:
    """An index of packages with what the agent of verifiers has installed in its sandbox: uv, and what its program names."""
    wanted = ("uv", "openai", "mcp==2.0.0", "httpx", "httpx2", "tenacity", "certifi")

    def download(folder: Path) -> None:
        options = ["--python-version", "3.11", "--only-binary", ":all:", "--dest", folder]
        pip = [sys.executable, "-m", "pip", "download", "-q", *options, *wanted]
        subprocess.run(pip, check=True, timeout=INSTALL_TIMEOUT_S)
        for wheel in list(folder.iterdir()):
            project = folder / wheel.name.partition("-")[0].replace("_", "-").lower()
            project.mkdir()
            wheel.rename(project / wheel.name)

    return cached("verifiers-index", "\n".join(wanted), download)


def test_a_rollout_of_verifiers(own_snap: Snap, default_tar: Path, tmp_path: Path) -> None:
    """Its own agent in the sandbox, whose model is asked through verifiers on port 80 of this machine: the one host that it reaches."""
    python = python_with("verifiers", python312(), "verifiers==0.4.0", "e2b==2.56.0")
    own_snap("image", "import", default_tar, "--name", "full")  # it has pip and curl
    host = own_address()
    with contextlib.ExitStack() as open_now:
        index = open_now.enter_context(files_of(wheels()))
        steps = [
            bash(f"curl -s -m 10 http://{index}/ || echo shut"),
            bash("expr $(cat given) + 1 > answer"),
            {"text": "Done."},
        ]
        model = open_now.enter_context(provider(tmp_path, *steps))
        rules = f"allow:{host},{index}"
        server = open_now.enter_context(served(own_snap, tmp_path, "--network", rules))
        packages = {
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "PIP_INDEX_URL": f"http://{index}/",
            "PIP_TRUSTED_HOST": host,
            "UV_DEFAULT_INDEX": f"http://{index}/",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        agent = {
            "harness": {"env": packages},
            "runtime": {"type": "e2b", "image": "full", "creates_per_sec": None, "allow": []},
        }
        tunnel = {"type": "custom", "url": f"http://{host}", "port": 80}
        config = {
            "model": "gpt-scripted",
            "push": False,
            "output_dir": str(tmp_path / "outputs"),
            "run": {"dir": "run"},
            "client": {"base_url": f"{model.url}/v1", "api_key_var": "MODEL_KEY"},
            "env": {
                "taskset": {"id": "verifiers_notes"},
                "agent": agent,
                "interception": {"type": "server", "tunnel": tunnel},
            },
        }
        (tmp_path / "rollout.json").write_text(json.dumps(config))
        vf_eval = "from verifiers.v1.cli.eval.main import main; main()"
        evaluate = [python, "-c", vf_eval, "@", tmp_path / "rollout.json", "--no-rich"]
        run(server, tmp_path, "env", f"PYTHONPATH={PROGRAMS}", f"MODEL_KEY={KEY}", *evaluate)
        assert model.asked() == [0, 1, 2], (tmp_path / "outputs/run/traces.jsonl").read_text()
    (episode,) = map(json.loads, (tmp_path / "outputs" / "run" / "traces.jsonl").read_text().splitlines())
    (trace,) = episode["traces"]
    assert (trace["stop_condition"], trace["errors"]) == ("agent_completed", [])
    assert trace["rewards"]["right"]["score"] == 1.0
    messages = [node["message"] for node in trace["nodes"]]
    assert "shut\n" in [message["content"] for message in messages if message["role"] == "tool"]
    box = trace["agent"]["runtime"]["id"]
    assert own_snap("cat", f"{box}:/app/answer").stdout == "42\n"
    assert f"{index}: no rule allows this port" in {
        one for step in own_snap.json("log", box) for one in step["refused"]
    }


def harbor_run(server: Served, snap: Snap, tmp_path: Path, files: dict[str, str]) -> str:
    """An oracle run of a task, which earns its reward: its sandbox."""
    python = python_with("harbor", python312(), "harbor[e2b]==0.26.0")
    task = tmp_path / "task"
    for name, text in {"instruction.md": "Make /app/answer with the text 42.\n", **files}.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    harbor = "from harbor.cli.main import app; app()"
    options = ["run", "--path", task, "--agent", "oracle", "--env", "e2b", "--jobs-dir", tmp_path / "jobs", "--yes"]
    before = {one["id"] for one in snap.json("ls")}
    shown = run(server, tmp_path, python, "-c", harbor, *map(str, options))
    (found,) = (json.loads(path.read_text()) for path in (tmp_path / "jobs").glob("*/*/result.json"))
    assert found["exception_info"] is None, found
    assert found["verifier_result"]["rewards"] == {"reward": 1.0}, shown
    runs = [one["id"] for one in snap.json("ls") if one["image"] and not one["name"] and one["id"] not in before]
    (answered,) = [one for one in runs if snap("cat", f"{one}:/app/answer", code=None).stdout == "42\n"]
    assert sum(name == "exec" for name, _ in calls(snap, answered)) >= 3
    return str(answered)


TASK = """version = "1.0"
[metadata]
[verifier]
timeout_sec = 60
{verifier}
[agent]
timeout_sec = 60
[environment]
build_timeout_sec = 300
cpus = 1
memory_mb = 512
{environment}
"""


def test_an_oracle_run_of_harbor(server: Served, own_snap: Snap, tmp_path: Path) -> None:
    files = {
        "task.toml": TASK.format(verifier="", environment=""),
        "environment/Dockerfile": "FROM default\nWORKDIR /app\nCOPY given /app/given\nRUN echo built > /app/built\n",
        "environment/given": "given\n",
        "solution/solve.sh": "#!/bin/bash\ncat given built && echo 42 > /app/answer\n",
        "tests/test.sh": "#!/bin/bash\ngrep -c 42 /app/answer > /logs/verifier/reward.txt\n",
    }
    harbor_run(server, own_snap, tmp_path, files)


@pytest.fixture
def web() -> Iterator[str]:
    """The address of a server on port 80, which says 42."""

    class Says(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"42\n")

        def log_message(self, *args: object) -> None: ...

    try:
        listening = http.server.ThreadingHTTPServer((own_address(), 80), Says)
    except OSError as exc:
        pytest.skip(f"port 80 cannot be had: {exc}")
    with listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield str(listening.server_address[0])
        listening.shutdown()


def test_a_task_of_harbor_reaches_the_hosts_that_it_names_and_its_verifier_none(
    server: Served, own_snap: Snap, tmp_path: Path, web: str
) -> None:
    get = f'python3 -c \'import urllib.request as u; print(u.urlopen("http://{web}/", timeout=20).read().decode(), end="")\''
    hosts = f'network_mode = "allowlist"\nallowed_hosts = ["{web}", "*.allowed.example"]'
    files = {
        "task.toml": TASK.format(verifier='network_mode = "no-network"', environment=hosts),
        "environment/Dockerfile": "FROM default\nWORKDIR /app\n",
        "solution/solve.sh": f"#!/bin/bash\n! getent hosts evil.example && {get} > /app/answer\n",
        "tests/test.sh": f"#!/bin/bash\n! {get} && grep -c 42 /app/answer > /logs/verifier/reward.txt\n",
    }
    box = harbor_run(server, own_snap, tmp_path, files)
    refused = {sentence for step in own_snap.json("log", box) for sentence in step["refused"]}
    assert {"evil.example: no rule allows this name", f"{web}:80: no rule allows it"} <= refused
