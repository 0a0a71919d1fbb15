"""One program over many nodes.

from snapshotd.client import Fleet

with Fleet.open(["https://one:7676", "https://two:7676"]) as fleet:
    branches = fleet.fork("task", 64)
    scores = fleet.map(lambda branch: int(branch.exec("./score").stdout), branches)
"""
