"""Draw docs/terminal.svg: the README's agent in a real sandbox, and the real output of `snapshotd tree` and `snapshotd
diff`. As root:

    .venv/bin/python docs/picture.py [--state-dir DIR]

Without --state-dir, a daemon with a state directory of its own runs for as long as this takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
SHOWN = ("snapshotd tree", "snapshotd diff --patch before tax")
COLUMNS = 84


def agent() -> str:
    """The README's example of an agent."""
    return README.read_text().partition("```python\n")[2].partition("```")[0]


def shop() -> str:
    """The README's command that makes its folder."""
    return next(line for line in README.read_text().splitlines() if line.startswith("mkdir shop"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="snapshotd-picture-") as directory:
        folder = Path(directory)
        state = options.state_dir or folder / "state"

        env = {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "SNAPSHOTD_STATE_DIR": str(state)}

        def snapshotd(*words: str) -> str:
            command = [sys.executable, "-m", "snapshotd", *words]
            return subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env={**os.environ, **env}
            ).stdout

        subprocess.run(shop(), shell=True, check=True, cwd=folder)
        (folder / "agent.py").write_text(agent())
        try:
            if options.state_dir is None:
                snapshotd("image", "build", "default")
            snapshotd("run", "--workspace", "shop", "--name", "tax", "agent.py")
            snapshotd("tag", snapshotd("log", "--quiet", "tax").split()[1], "before")
            for fork in snapshotd("fork", "before", "--n", "2", "--name", "try", "--", "1.0{index}").split():
                snapshotd("attach", "-q", fork)
            draw([(line, snapshotd(*line.split()[1:])) for line in SHOWN])
        finally:
            if options.state_dir is None:
                snapshotd("daemon", "--stop")


def draw(shown: list[tuple[str, str]]) -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="standard")
    for line, output in shown:
        console.print(Text.assemble(("$ ", "dim"), (line, "bold")))
        console.print(Text.from_ansi(output.rstrip()), no_wrap=True, overflow="ellipsis")
    console.save_svg(str(DOCS / "terminal.svg"), title="snapshotd")


main()
