"""The API that the daemon and its clients share: one record for each thing, one row for each operation."""
