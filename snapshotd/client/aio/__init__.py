"""The asynchronous client. Most of it is made of the one for threads: `generate.py` tells how. `snapshotd.client` has its
names."""
