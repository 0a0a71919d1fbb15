def journal(catalog, ref):
    snapshot = catalog.resolve_snapshot(ref)
    t = catalog.get_trajectory(snapshot.trajectory)
    found = list(catalog.journal(snapshot.id, t.began))
    if not ref.startswith(snapshot.id[:8]):
        found += catalog.unbound(t.id)
    return found
