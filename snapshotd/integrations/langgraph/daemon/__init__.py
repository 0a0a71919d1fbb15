"""The daemon's part in a saver with a sandbox: the files of its checkpoints, and the people who decide."""
