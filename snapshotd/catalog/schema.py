"""The catalog's tables, as SQL: those of `OLDEST`, and in `MIGRATIONS` what each later version changed. The version is
`PRAGMA user_version`.

A released migration never changes. A file of an older version, from `OLDEST` on, is brought up to date in one
transaction at open. A new file takes the same steps.

Conventions: `pk` is the row's number in order of arrival, used for every reference and as "oldest first"; `id` is the
id that people see. Columns ending in `_ns` are nanoseconds (`_at_ns`: since the epoch), sizes are bytes. JSON columns
are ASCII. ANY marks free text that may come from a sandbox: TEXT, or a BLOB of UTF-8 with surrogates where the string
is not valid Unicode.
"""

from __future__ import annotations

APPLICATION_ID = 0x736E6170
"""`PRAGMA application_id` of every catalog: "snap" in ASCII. Tells `file` and us that this is no other program's
database."""

_OLDEST = """
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
    workdir       ANY NOT NULL,
    tree          TEXT                      -- NULL: its files are not in the repository
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
    head          INTEGER NOT NULL REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- 0 only inside a transaction
    began         INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- NULL: no program was started
    fence         INTEGER NOT NULL DEFAULT 0,  -- the latest writer's fence
    disk_bytes    INTEGER NOT NULL DEFAULT 0   -- types.Limits; 0: the daemon's own limit
) STRICT;
CREATE INDEX trajectories_by_image ON trajectories (image);
CREATE INDEX trajectories_by_status ON trajectories (status);
CREATE INDEX trajectories_by_experiment ON trajectories (experiment) WHERE experiment IS NOT NULL;
CREATE INDEX trajectories_by_forked_from ON trajectories (forked_from);  -- also what the reference check on deletion uses
CREATE INDEX trajectories_by_head ON trajectories (head);                -- the same
CREATE INDEX trajectories_by_began ON trajectories (began) WHERE began IS NOT NULL;

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
    -- where its tree is derived from; see types.Snapshot. NULL: the image
    base               INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,
    own_layers         INTEGER NOT NULL DEFAULT 0,
    tree               TEXT,                -- not NULL only when stored
    record             TEXT,                -- NULL: never stored
    line               INTEGER REFERENCES lines DEFERRABLE INITIALLY DEFERRED,      -- never NULL
    follows            INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- NULL: its parent
    agent_state        INTEGER REFERENCES states,                                   -- NULL: {}
    call_arguments     TEXT NOT NULL DEFAULT 'null',  -- JSON; last, because it may be long and what follows a long value is slow to reach
    UNIQUE (trajectory, seq)
) STRICT;
CREATE INDEX snapshots_by_parent ON snapshots (parent);
CREATE INDEX snapshots_by_stack ON snapshots (stack);
CREATE INDEX snapshots_captured ON snapshots (state) WHERE state = 'captured';  -- what is to be archived; empty most of the time
CREATE INDEX snapshots_by_base ON snapshots (base);                             -- also what the reference check on deletion uses
CREATE INDEX snapshots_by_line ON snapshots (line);
CREATE INDEX snapshots_by_follows ON snapshots (follows) WHERE follows IS NOT NULL;
CREATE INDEX snapshots_by_agent_state ON snapshots (agent_state) WHERE agent_state IS NOT NULL;

CREATE TABLE tags (
    name     TEXT PRIMARY KEY,
    snapshot INTEGER NOT NULL REFERENCES snapshots
) STRICT, WITHOUT ROWID;
CREATE INDEX tags_by_snapshot ON tags (snapshot);

-- A line: a stretch of conversation and journal. A trajectory begins with one, and a snapshot that follows another than its parent begins
-- the next. The trajectory's present line is its latest.
CREATE TABLE lines (
    pk          INTEGER PRIMARY KEY,
    trajectory  INTEGER NOT NULL REFERENCES trajectories DEFERRABLE INITIALLY DEFERRED,
    forked_from INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- what it continues; NULL: nothing
    kept        INTEGER NOT NULL            -- so many messages of that; its own have positions from here on
) STRICT;
CREATE INDEX lines_by_trajectory ON lines (trajectory);
CREATE INDEX lines_by_forked_from ON lines (forked_from) WHERE forked_from IS NOT NULL;

-- The agent's state: one row per distinct state that was saved, shared by the snapshots that did not change it.
CREATE TABLE states (
    pk      INTEGER PRIMARY KEY,
    content TEXT NOT NULL                   -- JSON object
) STRICT;

-- Conversations. A line holds only the messages that it added itself.
CREATE TABLE messages (
    pk       INTEGER PRIMARY KEY,
    line     INTEGER NOT NULL REFERENCES lines,
    position INTEGER NOT NULL,              -- from 0 at the beginning of the whole conversation
    role     ANY NOT NULL,
    content  TEXT NOT NULL,                 -- JSON
    UNIQUE (line, position)
) STRICT;

-- The journal. `number` is the order in which a line's entries began; it has gaps once an entry was left unbound.
CREATE TABLE entries (
    pk            INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    line          INTEGER NOT NULL REFERENCES lines,
    number        INTEGER NOT NULL,
    snapshot      INTEGER REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,  -- which binds it; NULL: none does (yet)
    kind          TEXT NOT NULL,            -- types.EntryKind
    name          ANY NOT NULL,
    head          TEXT NOT NULL,            -- id of the snapshot after which it began; it need not be here
    began_at_ns   INTEGER NOT NULL,
    side_effect   TEXT NOT NULL,            -- types.SideEffect
    key           ANY,                      -- the idempotency key; NULL: none
    status        TEXT,                     -- types.CallStatus; NULL: open
    ended_at_ns   INTEGER,
    error         ANY,
    facts         TEXT,                     -- JSON list; NULL: empty
    details       TEXT,                     -- JSON object; NULL: empty
    result        TEXT,                     -- JSON; NULL: null
    arguments     TEXT                      -- JSON; NULL: those of the call of `snapshot`, which has the same id
) STRICT;
CREATE INDEX entries_by_line ON entries (line, number);
CREATE INDEX entries_by_snapshot ON entries (snapshot, number) WHERE snapshot IS NOT NULL;
CREATE INDEX entries_unbound ON entries (line, status) WHERE snapshot IS NULL;

CREATE TABLE approvals (
    pk            INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    trajectory    INTEGER NOT NULL REFERENCES trajectories,
    snapshot      INTEGER NOT NULL REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,
    entry         TEXT NOT NULL,            -- id of the call that waits; it need not have begun
    tool          ANY NOT NULL,
    digest        TEXT NOT NULL,            -- of [tool, arguments]
    side_effect   TEXT NOT NULL,            -- types.SideEffect
    created_at_ns INTEGER NOT NULL,
    question      ANY,
    status        TEXT NOT NULL,            -- types.ApprovalStatus
    expires_at_ns INTEGER,
    decided_at_ns INTEGER,
    decided_by    ANY,
    reason        ANY,
    edited        TEXT,                     -- JSON of the arguments that took the place of those asked for; NULL: none did
    arguments     TEXT NOT NULL             -- JSON
) STRICT;
CREATE INDEX approvals_by_trajectory ON approvals (trajectory);
CREATE INDEX approvals_by_snapshot ON approvals (snapshot);
CREATE INDEX approvals_by_entry ON approvals (entry);
CREATE INDEX approvals_by_status ON approvals (status);

CREATE TABLE compensations (
    entry       TEXT NOT NULL PRIMARY KEY,  -- id of the call that is made up for; it may be an ancestor's
    trajectory  INTEGER NOT NULL REFERENCES trajectories,
    status      TEXT,                       -- types.CallStatus; NULL: begun, nobody saw it end
    began_at_ns INTEGER NOT NULL,
    ended_at_ns INTEGER,
    exit_code   INTEGER,
    error       ANY
) STRICT;
CREATE INDEX compensations_by_trajectory ON compensations (trajectory);

-- The key-value store. A key's row stays when all its versions are gone: version numbers are never used again.
CREATE TABLE keys (
    pk        INTEGER PRIMARY KEY,
    tenant    BLOB NOT NULL,                -- UTF-8 (with surrogates), so that all keys sort alike
    namespace BLOB NOT NULL,
    key       BLOB NOT NULL,
    version   INTEGER NOT NULL,             -- the latest; 0: none yet
    UNIQUE (tenant, namespace, key)
) STRICT;
CREATE TABLE key_versions (
    pk            INTEGER PRIMARY KEY,
    key           INTEGER NOT NULL REFERENCES keys,
    version       INTEGER NOT NULL,         -- from 1
    created_at_ns INTEGER NOT NULL,
    expires_at_ns INTEGER,                  -- NULL: never
    value         TEXT,                     -- JSON; NULL: a deletion
    request       TEXT,                     -- what its maker calls the change; NULL: nothing
    UNIQUE (key, version)
) STRICT;
CREATE INDEX key_versions_by_expiry ON key_versions (expires_at_ns) WHERE expires_at_ns IS NOT NULL;
CREATE UNIQUE INDEX key_versions_by_request ON key_versions (key, request) WHERE request IS NOT NULL;

-- Outputs of calls that were damaged and given up. The call's own column is NULL.
CREATE TABLE damaged_outputs (
    snapshot INTEGER NOT NULL REFERENCES snapshots DEFERRABLE INITIALLY DEFERRED,
    which    TEXT NOT NULL,                 -- output, stdout or stderr
    hash     TEXT NOT NULL,                 -- its blob id
    bytes    INTEGER,                       -- its length; NULL: unknown
    PRIMARY KEY (snapshot, which)
) STRICT;

-- Requests with an idempotency key, as long as their clients may ask again (requests.py).
CREATE TABLE requests (
    pk            INTEGER PRIMARY KEY,
    key           TEXT NOT NULL UNIQUE,
    digest        TEXT NOT NULL,            -- of method, path and body
    made          TEXT NOT NULL,            -- JSON list of ids; the things themselves may be gone
    created_at_ns INTEGER NOT NULL
) STRICT;
CREATE INDEX requests_by_age ON requests (created_at_ns);
"""

_V7 = """
CREATE TABLE experiments (
    pk            INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,     -- that of its branches' trajectories
    name          TEXT NOT NULL UNIQUE,
    snapshot      TEXT NOT NULL,            -- id; it may be gone
    began_at_ns   INTEGER NOT NULL,
    ended         ANY,                      -- why no other branch begins; NULL: some may
    digest        TEXT NOT NULL,            -- of the description
    files         BLOB,                     -- the scorer's, as a tar; NULL: it brings none
    description   TEXT                      -- JSON; NULL: it came from an earlier version
) STRICT;
CREATE TABLE experiment_branches (
    pk            INTEGER PRIMARY KEY,      -- in the order in which they begin
    experiment    INTEGER NOT NULL REFERENCES experiments,
    label         TEXT NOT NULL,
    run           INTEGER NOT NULL,
    state         TEXT NOT NULL,            -- scores.ExperimentBranch
    trajectory    TEXT,                     -- id; it may be gone
    outcome       TEXT NOT NULL,            -- JSON object of its other fields
    UNIQUE (experiment, label, run)
) STRICT;
CREATE INDEX experiment_branches_by_trajectory ON experiment_branches (trajectory) WHERE trajectory IS NOT NULL;
"""

OLDEST = 6
"""The oldest version that this program reads."""
MIGRATIONS = {7: _V7}
"""For each later version, what brings a file of the version before to it."""
VERSION = max(MIGRATIONS)
"""The version this program writes, and the newest it reads."""


def tables(after: int = 0) -> str:
    """SQL that makes the tables of the present version out of those of version `after`; 0: of nothing."""
    steps = [_OLDEST] if after < OLDEST else []
    return "".join(steps + [migration for later, migration in sorted(MIGRATIONS.items()) if later > after])


def script(version: int) -> str:
    """SQL that brings a database of a version to the present one; 0: an empty database."""
    return f"{tables(version)} PRAGMA user_version = {VERSION};"
