"""Callers from other machines: who they are, and what they may do."""
