"""The API within a sandbox, which E2B's `envd` serves there on port 49983: commands, terminals, files."""
