"""Links, addresses and routes of network namespaces."""
