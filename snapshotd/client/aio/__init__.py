"""The asynchronous client: its connections, and its classes. `snapshotd.client` has their names."""
