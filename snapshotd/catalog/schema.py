"""The catalog's tables, as SQL. `MIGRATIONS[n]` brings a file from version n to n + 1; the version is `PRAGMA user_version`.

A released migration never changes. A file of any older version is brought up to date in one transaction at open.

Conventions: `pk` is the row's number in order of arrival, used for every reference and as "oldest first"; `id` is the id that people
see. Columns ending in `_ns` are nanoseconds (`_at_ns`: since the epoch), sizes are bytes. JSON columns are ASCII. ANY marks free
text that may come from a sandbox: TEXT, or a BLOB of UTF-8 with surrogates where the string is not valid Unicode.
"""

from __future__ import annotations

APPLICATION_ID = 0x736E6170
"""`PRAGMA application_id` of every catalog: "snap" in ASCII. Tells `file` and us that this is no other program's database."""

_V1 = """
-- Named facts of this state directory.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE images (
    pk            INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    name          TEXT NOT NULL,            -- '' once a newer image took the name
    source        ANY NOT NULL,             -- for people
    source_id     ANY NOT NULL,             -- equal for equal content of the source
    bytes         INTEGER NOT NULL,
    files         INTEGER NOT NULL,
    created_at_ns INTEGER NOT NULL,
    env           TEXT NOT NULL,            -- JSON [[name, value], ...]
    workdir       ANY NOT NULL
) STRICT;
CREATE UNIQUE INDEX images_by_name ON images (name) WHERE name <> '';

CREATE TABLE trajectories (
    pk            INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    name          TEXT UNIQUE,              -- NULL: has none
    image         INTEGER NOT NULL REFERENCES images,
    runtime       TEXT NOT NULL,            -- name of the driver
    network       TEXT NOT NULL,            -- types.Network
    memory_bytes  INTEGER NOT NULL,
    cpus          REAL NOT NULL,            -- whole processors
    pids          INTEGER NOT NULL,
    agent         TEXT,                     -- JSON {argv, program, cwd, env}; NULL: a sandbox without an agent
    env           TEXT NOT NULL,            -- JSON [[name, value], ...]
    status        TEXT NOT NULL,            -- types.TrajectoryStatus
    exit_code     INTEGER,                  -- NULL: not known (yet)
    created_at_ns INTEGER NOT NULL,
    experiment    TEXT,                     -- NULL: not made by a fork
    forked_from   INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- NULL: not a fork
    head          INTEGER NOT NULL REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED  -- 0 only inside a transaction
) STRICT;
CREATE INDEX trajectories_by_image ON trajectories (image);
CREATE INDEX trajectories_by_status ON trajectories (status);
CREATE INDEX trajectories_by_experiment ON trajectories (experiment) WHERE experiment IS NOT NULL;
CREATE INDEX trajectories_by_forked_from ON trajectories (forked_from);  -- also what the reference check on deletion uses
CREATE INDEX trajectories_by_head ON trajectories (head);                -- the same

-- What a root is made of. A snapshot that changed no file shares its parent's row, which is the usual case, so the plain list of
-- ids (1.1 KB at 32 layers) was kept: 10,000 different stacks of 17-32 layers take 10 MB, 19 us each to write and 41 ms to scan for
-- all layers; numbers in place of ids took 2.3 MB, 30 us and 25 ms, and needed a second table that must be swept.
CREATE TABLE stacks (
    pk     INTEGER PRIMARY KEY,
    image  INTEGER NOT NULL REFERENCES images,
    layers TEXT NOT NULL                    -- JSON list of layer ids, newest first
) STRICT;
CREATE INDEX stacks_by_image ON stacks (image);

CREATE TABLE snapshots (
    pk                 INTEGER PRIMARY KEY,
    id                 TEXT NOT NULL UNIQUE,
    trajectory         INTEGER NOT NULL REFERENCES trajectories DEFERRABLE INITIALLY DEFERRED,
    seq                INTEGER NOT NULL,
    parent             INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- NULL: the first of a line
    stack              INTEGER NOT NULL REFERENCES stacks,
    messages           INTEGER NOT NULL,    -- length of the conversation up to here, from its beginning, across forks
    state              TEXT NOT NULL,       -- types.SnapshotState
    pause_ns           INTEGER NOT NULL,
    created_at_ns      INTEGER NOT NULL,
    method             TEXT NOT NULL,       -- types.Snapshot.method
    files_added        INTEGER,             -- the four are NULL together until the files are counted
    files_changed      INTEGER,
    files_deleted      INTEGER,
    files_bytes        INTEGER,
    -- the tool call; every snapshot has exactly one
    call_id            TEXT NOT NULL,
    call_name          ANY NOT NULL,
    call_status        TEXT NOT NULL,       -- types.CallStatus
    call_started_at_ns INTEGER NOT NULL,
    call_duration_ns   INTEGER NOT NULL,
    call_exit_code     INTEGER,             -- NULL: it has none
    call_error         ANY,                 -- NULL: none
    call_output        TEXT,                -- blob ids; NULL: no such output
    call_stdout        TEXT,
    call_stderr        TEXT,
    call_arguments     TEXT NOT NULL,       -- JSON; last, because it may be long and what follows a long value is slow to reach
    UNIQUE (trajectory, seq)
) STRICT;
CREATE INDEX snapshots_by_parent ON snapshots (parent);
CREATE INDEX snapshots_by_stack ON snapshots (stack);

CREATE TABLE tags (
    name     TEXT PRIMARY KEY,
    snapshot INTEGER NOT NULL REFERENCES snapshots
) STRICT, WITHOUT ROWID;
CREATE INDEX tags_by_snapshot ON tags (snapshot);

-- Conversations. A trajectory holds only the messages it added itself: a fork's begin at the position where it was forked.
CREATE TABLE messages (
    pk         INTEGER PRIMARY KEY,
    trajectory INTEGER NOT NULL REFERENCES trajectories,
    position   INTEGER NOT NULL,            -- from 0 at the beginning of the whole conversation
    role       ANY NOT NULL,
    content    TEXT NOT NULL,               -- JSON
    UNIQUE (trajectory, position)
) STRICT;
"""

_V2 = """
ALTER TABLE images ADD COLUMN tree TEXT;                -- NULL: its files are not in the repository
-- Where a snapshot's tree is derived from; see types.Snapshot. NULL: the image.
ALTER TABLE snapshots ADD COLUMN base INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE snapshots ADD COLUMN own_layers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE snapshots ADD COLUMN tree TEXT;             -- not NULL only when stored
ALTER TABLE snapshots ADD COLUMN record TEXT;           -- NULL: never stored
-- The possibly long value moves behind the new columns, so that scans for them do not read it.
ALTER TABLE snapshots ADD COLUMN arguments TEXT NOT NULL DEFAULT 'null';
-- `stored` meant that the layers were flushed and now means that they are in the repository, where nothing is yet. Everything can still be
-- derived from the image, with the whole stack.
UPDATE snapshots SET arguments = call_arguments, state = CASE state WHEN 'stored' THEN 'captured' ELSE state END,
    own_layers = (SELECT json_array_length(layers) FROM stacks WHERE stacks.pk = snapshots.stack);
ALTER TABLE snapshots DROP COLUMN call_arguments;
ALTER TABLE snapshots RENAME COLUMN arguments TO call_arguments;
CREATE INDEX snapshots_captured ON snapshots (state) WHERE state = 'captured';  -- what is to be archived; empty most of the time
CREATE INDEX snapshots_by_base ON snapshots (base);                             -- also what the reference check on deletion uses
"""

MIGRATIONS: tuple[str, ...] = (_V1, _V2)
VERSION = len(MIGRATIONS)
"""The version this program writes, and the newest it reads."""
