"""A daemon as a node of a fleet: what it adds to `fleet/base.py`, and the parts that it is made of.

    lease        the node's lease, renewed by a thread of its own; the trajectories that it owns (lease.py)
    freezer      stops every sandbox when the lease is over, and lets them go on when it is renewed (freezer.py)
    watchdog     a process that does the same when the daemon is dead or stopped (watchdog.py)
    publisher    makes stored snapshots known to the fleet
    takeover     brings another node's published history here, and moves unpublished snapshots to a side branch
    node         what follows from a renewal: sandboxes of lost trajectories end, a draining node hands over (node.py)

Order of events when a lease cannot be renewed: the freezer stops all sandboxes `margin_ns` before its end; nothing is
published and no irreversible call begins. After a renewal, sandboxes of trajectories that were taken over meanwhile end,
and only then do the others go on.
"""
