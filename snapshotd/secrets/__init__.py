"""Secrets in records: found, replaced by markers, kept encrypted, and put back for the trajectories that recorded
them."""
