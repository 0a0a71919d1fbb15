"""`python -m snapshotd` is the command `snapshotd`."""

import sys

from snapshotd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
