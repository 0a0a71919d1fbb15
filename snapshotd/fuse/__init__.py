"""Snapshots as file systems: a lazy lower layer for sandboxes, and a folder to browse. See server.py and lazy.py."""
