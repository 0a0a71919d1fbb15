"""The page of `snapshotd ui`."""
