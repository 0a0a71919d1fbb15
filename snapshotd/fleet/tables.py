"""The fleet's tables, beside the catalog's in the same PostgreSQL database: one schema more, so that the catalog's stays as
it is. Columns ending in `_ns` are nanoseconds, by the server's clock."""

from __future__ import annotations

VERSION = 1

STATEMENTS = """
CREATE TABLE {schema}.format (version BIGINT NOT NULL);
INSERT INTO {schema}.format VALUES (1);
CREATE TABLE {schema}.nodes (
    node               TEXT PRIMARY KEY,
    host               TEXT NOT NULL,      -- the machine and its boot
    epoch              BIGINT NOT NULL,    -- the node's latest daemon
    renewals           BIGINT NOT NULL,
    until_ns           BIGINT NOT NULL,
    draining           BOOLEAN NOT NULL DEFAULT false,
    room               TEXT NOT NULL,      -- JSON: what the node said of itself when it renewed
    free_bytes         BIGINT NOT NULL,    -- memory, as of the last renewal
    starting           BIGINT NOT NULL,    -- sandboxes, as of the last renewal
    starting_most      BIGINT NOT NULL,
    reserved_bytes     BIGINT NOT NULL DEFAULT 0,
    reserved           BIGINT NOT NULL DEFAULT 0  -- sandboxes that are reserved and not begun
) WITH (fillfactor = 50);
CREATE INDEX nodes_by_lease ON {schema}.nodes (until_ns);
CREATE TABLE {schema}.owners (
    trajectory TEXT PRIMARY KEY,
    node       TEXT,                       -- NULL: handed over
    epoch      BIGINT NOT NULL,
    fence      BIGINT NOT NULL,
    head       TEXT,                       -- the last published snapshot
    side_of    TEXT
) WITH (fillfactor = 50);
CREATE INDEX owners_by_node ON {schema}.owners (node);
CREATE TABLE {schema}.published (
    snapshot   TEXT PRIMARY KEY,
    trajectory TEXT NOT NULL
);
CREATE TABLE {schema}.intents (
    call       TEXT PRIMARY KEY,
    trajectory TEXT NOT NULL,
    fence      BIGINT NOT NULL,
    state      TEXT NOT NULL               -- base.IntentState
);
CREATE INDEX intents_by_trajectory ON {schema}.intents (trajectory) WHERE state <> 'bound';
CREATE TABLE {schema}.reservations (
    id       TEXT PRIMARY KEY,
    node     TEXT NOT NULL,
    bytes    BIGINT NOT NULL,
    count    BIGINT NOT NULL,
    until_ns BIGINT NOT NULL
);
CREATE INDEX reservations_by_node ON {schema}.reservations (node, until_ns);
"""
