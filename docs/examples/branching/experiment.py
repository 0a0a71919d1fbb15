"""The same as eight_ways.py, as an experiment.

    experiment.py PROJECT

`repair.toml` describes it: eight repairs of one state, two at a time, scored with tests that none of them has seen. The
command `snapshotd experiment run repair.toml` would do as well.
"""

import sys
from pathlib import Path

from snapshotd.client import Snapshotd

HERE = Path(__file__).resolve().parent


def main(project: Path) -> None:
    client = Snapshotd()
    agent = client.run(agent=HERE.parent / "fix_agent.py", workspace=project, name=f"agent-{project.name}")
    for _ in client.events(agent.id):
        pass
    edit = next(one for one in client.log(agent.id) if one.tool.name == "edit_file")
    assert edit.parent is not None
    client.tag(edit.parent, "before-the-edit", move=True)

    info = client.run_experiment(HERE / "repair.toml")
    for variant in info.variants:
        (branch,) = variant.branches
        print(f"{variant.rank}. repair {variant.label}: {branch.score}, {branch.lines} lines, {branch.calls} calls")
    print("ended:", info.ended)

    taken = client.promote_experiment(info.name, leave_behind=True, wait="stored")
    applied = client.apply(taken.id, project, commit="Repair the splitter")
    print("commit", applied.commit)
    client.remove_experiment(info.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
