"""snapshotd: one atomic snapshot of files, conversation and tool call after every tool call of an agent."""

__version__ = "0.1.0"
