"""Bytes under keys: where packs lie."""
