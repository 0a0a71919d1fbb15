"""Secrets in what is recorded: found, replaced by markers, kept encrypted, and put back for who recorded them."""
