"""The control API: sandboxes, snapshots and templates."""
