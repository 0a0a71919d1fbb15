"""Repair a bug eight ways, keep the best repair, and commit it.

    eight_ways.py PROJECT

PROJECT is a git folder with the bug, as `prepare.py` makes it. An agent finds the bug and repairs it. From the snapshot
before its first edit eight forks repair it in other ways; tests that none of them has seen score the repairs; the best
one becomes the agent's own head, and goes to PROJECT as a commit.
"""

import sys
from pathlib import Path

from snapshotd.client import Snapshotd

HERE = Path(__file__).resolve().parent
TESTS = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml", "/tmp/r.xml", "hidden"]


def main(project: Path) -> None:
    client = Snapshotd()
    agent = client.run(agent=HERE.parent / "fix_agent.py", workspace=project, name=f"fix-{project.name}")
    for event in client.events(agent.id):
        if event["event"] == "snapshot":
            print("agent:", event["name"])

    edit = next(one for one in client.log(agent.id) if one.tool.name == "edit_file")
    assert edit.parent is not None
    queue = client.fork_queue(edit.parent, 8, parallel=4, args=["--repair", "{index}"], name=f"repair-{project.name}")
    forks = [child.trajectory.id for child in queue.children if child.trajectory is not None]

    scores = client.score(forks, TESTS, junit="/tmp/r.xml", with_files=HERE / "hidden", with_path="/workspace/hidden")
    for row in scores:
        tests = row.runs[0].tests
        print(f"{row.rank}. {client.trajectory(row.ref).name}: {row.mean:.2f}", tests or row.error)
    best, worst = scores[0].ref, scores[-1].ref

    found = client.compare(best, worst).pairs[0].first_difference
    assert found is not None
    print(f"best and worst part at call {found.number}: {found.difference}")

    taken = client.promote(best, leave_behind=True)
    print(f"{client.trajectory(agent.id).name} goes on from {client.trajectory(best).name}")

    applied = client.apply(taken.id, project, commit="Repair the splitter")
    for change in applied.changes:
        print(change.change, change.path.decode())
    print("commit", applied.commit)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
