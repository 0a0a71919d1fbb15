"""The abilities of this host, found out by doing what the daemon does."""
