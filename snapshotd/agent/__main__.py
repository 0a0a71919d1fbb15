"""`python3 -m snapshotd.agent`: the command `snapshotd-agent`."""

import sys

from snapshotd.agent.command import main

if __name__ == "__main__":
    sys.exit(main())
