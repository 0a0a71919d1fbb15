"""A server of the Model Context Protocol: the daemon's verbs as tools, its snapshots and files as resources.

    a client (Claude Code, Codex, an IDE)
       │ stdio, or HTTP on the loopback (transports.py)
    server.py ─► hands.py, history.py, branches.py, resources.py ─► the daemon
       ├─ reach.py      what this client may touch
       └─ approvals.py  asks the person at the client

`docs/integrations/mcp.md` is its page. It is a client of the daemon like any other and keeps no state: a sandbox is an
argument of each tool. Needs the extra `snapshotd[mcp]`.
"""
