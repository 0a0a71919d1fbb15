"""How long an agent stands still, as root and as an ordinary user, with a range of further ids and with one id:

    python benchmarks/ways.py --image TAR [--rounds 60]

As root: it makes a user for as long as it runs. The three ways take turns, `TURNS` of each, so that other work on the
machine slows all of them. TAR: an archive of a root with Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ordinary_user import OrdinaryUser, interpreter, ordinary_users

BENCH = Path(__file__).with_name("bench.py")
TURNS = 2
SCENARIOS = ("--scenario", "no change", "--scenario", "one file", "--scenario", "200 files")
"""Without those of large files: where the home has no reflink, they measure a copy of a GiB."""


def measure(image: Path, rounds: int, folder: Path, user: OrdinaryUser | None) -> dict[str, Any]:
    """The pauses of one run, by scenario."""
    given = image if user is None else user.give(image, "image.tar")
    report = folder / "report.json"
    argv = [BENCH, "--only", "pauses", "--rounds", str(rounds), "--image", given, "--json", report, *SCENARIOS]
    env = {"TMPDIR": str(folder), "DOCKER_HOST": "unix:///nowhere"}
    if user is None:
        subprocess.run([sys.executable, *map(str, argv)], env={**os.environ, **env}, check=True, capture_output=True)
    else:
        user.run(interpreter(), *argv, env=env, timeout=1800)
    pauses: dict[str, Any] = json.loads(report.read_text())["pauses"]
    return pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"root": [], "range": [], "one id": []}
    with TemporaryDirectory(dir="/var/tmp") as folder, ordinary_users(2, ids=[True, False]) as (several, one):
        for _ in range(TURNS):
            found["root"].append(measure(options.image, options.rounds, Path(folder), None))
            for way, user in (("range", several), ("one id", one)):
                found[way].append(measure(options.image, options.rounds, user.home, user))
    print("| scenario | root p50 | range p50 | of root | one id p50 | of root |")
    print("|---|---:|---:|---:|---:|---:|")
    for scenario in found["root"][0]:
        root, several_ids, one_id = (
            statistics.mean(turn[scenario]["pause_ms"]["p50"] for turn in turns) for turns in found.values()
        )
        ratios = several_ids / root, one_id / root
        print(f"| {scenario} | {root:.2f} | {several_ids:.2f} | {ratios[0]:.1f} | {one_id:.2f} | {ratios[1]:.1f} |")
    print("\nMilliseconds, means of the medians of each turn.")


main()
