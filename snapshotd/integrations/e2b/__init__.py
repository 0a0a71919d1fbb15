"""The wire of E2B: its Python and JavaScript SDKs, and all that is built on them, with sandboxes of this machine.

    an SDK ──HTTP──► server.py      whose request it is: by the host, or by headers
                       ├─ control/  sandboxes, snapshots, templates: the control API, JSON
                       ├─ inside/   commands, terminals, files: the API within a sandbox, Connect-RPC (connect.py) and /files
                       └─ traffic.py  servers in sandboxes, by the port in the host
                     all ─► the daemon, by its client

A sandbox is a trajectory, forked from its template's snapshot. Each command and each written file is a call with a
snapshot. Metadata of a sandbox, its end and its template, which the daemon does not know, are one value of the daemon's store
(records.py), so the server may be started anew at any time. `docs/integrations/e2b.md` is its page. Needs the extra
`snapshotd[e2b]`.
"""
