"""Many nodes with one history: leases, fences, and where a fork goes. `base` is the specification."""
