"""The programs for other services in docs/client.md: their SDKs have every call, with these parameters. They cannot run
here; mypy reads them beside the SDKs, which are typed."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"
INSTALL_S = 900
WRONG = {
    "e2b": (("fork(count=2)", "fork(number=2)"), (".commands.run(", ".commands.start("), (".kill()", ".remove()")),
    "modal": (("create(app=app)", "create(application=app)"), ("snapshot_filesystem", "snapshot_files")),
    "daytona": (
        (".fs.upload_file(", ".fs.put("),
        (".process.exec(", ".process.run("),
        ("fork(name)", "fork(label=name)"),
    ),
}
"""A name that an SDK does not have, in place of one of the program's."""


@pytest.mark.long
@pytest.mark.timeout(INSTALL_S)
@pytest.mark.parametrize("sdk", WRONG)
def test_the_program_is_one_of_its_sdk(tmp_path: Path, sdk: str) -> None:
    found = re.search(rf"^With {sdk} \((\S+)\):\n\n```python\n(.*?)```", PAGE.read_text(), re.S | re.I | re.M)
    assert found is not None
    version, program = found.groups()
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{sdk}=={version}.*"], check=True, timeout=INSTALL_S)
    (tmp_path / "right.py").write_text(program)
    for number, (name, other) in enumerate(WRONG[sdk]):
        assert name in program
        (tmp_path / f"wrong_{number}.py").write_text(program.replace(name, other))
    options = [
        "--no-incremental",
        "--follow-imports=silent",
        "--follow-untyped-imports",
        "--config-file=",
        f"--python-executable={python}",
    ]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *sorted(path.name for path in tmp_path.glob("*.py"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    wrong = {line.partition(":")[0] for line in checked.stdout.splitlines() if ": error: " in line}
    assert wrong == {f"wrong_{number}.py" for number in range(len(WRONG[sdk]))}, checked.stdout + checked.stderr
