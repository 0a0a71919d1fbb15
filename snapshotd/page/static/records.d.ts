// Made by `make docs` from docs/openapi.json.

declare namespace Api {
  interface AgentInfo {
    argv: (string)[];
    cwd: string;
    program: number;
  }

  interface AlignedCall {
    difference: "same" | "arguments" | "outcome" | "left" | "right";
    left: SnapshotInfo | null;
    number: number;
    right: SnapshotInfo | null;
  }

  interface AppliedInfo {
    change: "added" | "changed" | "deleted";
    kind: string;
    merged: boolean;
    path: string;
    path_b64?: string | null;
  }

  interface ApprovalInfo {
    arguments: unknown;
    by: string | null;
    call: string;
    created_at: string;
    decided_at: string | null;
    digest: string;
    edited: (unknown)[] | null;
    expires_at: string | null;
    id: string;
    name: string;
    question: string | null;
    reason: string | null;
    side_effect: "local" | "idempotent" | "irreversible";
    snapshot: string;
    status: "pending" | "approved" | "denied" | "expired" | "stale";
    trajectory: string;
  }

  type ApprovalStatus = "pending" | "approved" | "denied" | "expired" | "stale";

  interface ApprovalView {
    approval: ApprovalInfo;
    changes: (ChangeInfo)[];
    more: boolean;
    since: string | null;
    trajectory: TrajectoryInfo;
  }

  interface ApproveRequest {
    arguments?: unknown;
    by?: string | null;
    reason?: string | null;
  }

  interface AskRequest {
    arguments?: unknown;
    call: string;
    expires_s?: number | null;
    question?: string | null;
    side_effect?: "local" | "idempotent" | "irreversible";
    tool: string;
    trajectory: string;
  }

  interface AuditInfo {
    address: string | null;
    caller: string | null;
    happened_at: string;
    operation: string;
    status: string;
    tenant: string | null;
    token_id: string | null;
    verb: string | null;
  }

  interface BackgroundRequest {
    argv: (string)[];
    cwd?: string | null;
    env?: Record<string, string>;
    idle_timeout_s?: number | null;
    service?: ServiceOptions | null;
    stdin?: boolean;
    timeout_s?: number | null;
    user?: string | null;
  }

  interface BisectRequest {
    argv: (string)[];
    bad?: string | null;
    cwd?: string | null;
    env?: Record<string, string>;
    good?: string | null;
    parallel?: number;
    ref?: string;
    repeat?: number;
    user?: string | null;
  }

  interface BranchInfo {
    added: number;
    call_count: number;
    changed: number;
    deleted: number;
    exit_code: number | null;
    failed: number;
    forked_with: string;
    head: SnapshotInfo;
    name: string | null;
    ref: string;
    seconds: number;
    status: string;
    tokens: [number, number];
  }

  interface ChangeInfo {
    after: EntryInfo | null;
    before: EntryInfo | null;
    change: "added" | "changed" | "deleted";
    path: string;
    path_b64?: string | null;
  }

  interface CheckRequest {
    read_data?: boolean;
  }

  interface CommandInfo {
    argv: (string)[];
    background: boolean;
    cwd: string;
    ended_at: string | null;
    error: string | null;
    exit_code: number | null;
    id: string;
    port: number | null;
    restarts: number;
    service: string | null;
    service_state: "starting" | "ready" | "ended" | "failed" | "stopped" | null;
    snapshot: string | null;
    started_at: string;
    status: "running" | "done" | "failed" | "interrupted" | "timed-out" | "unknown";
    stdin: boolean;
    timeout_s: number | null;
    trajectory: string;
  }

  interface CompareInfo {
    branches: (BranchInfo)[];
    fork_point: SnapshotInfo | null;
    pairs: (PairInfo)[];
  }

  interface CompareRequest {
    refs: (string)[];
  }

  interface CompensateRequest {
    calls?: (string)[];
  }

  interface ConflictInfo {
    path: string;
    path_b64?: string | null;
    reason: string;
  }

  interface CreateRequest {
    capture_tokens?: boolean;
    env?: Record<string, string>;
    idle_timeout_s?: number;
    image?: string;
    limits?: LimitsRequest;
    name?: string | null;
    network?: string | null;
    program?: string | null;
    providers?: (Provider)[];
    requirements?: string | null;
    runtime?: "auto" | "runc" | "docker" | "none";
    secrets?: Record<string, string>;
    services?: string | null;
    tenant?: string;
    workspace?: string | null;
  }

  interface CreateTokenRequest {
    expires_s?: number | null;
    name: string;
    scopes?: ("read" | "run" | "approve" | "admin")[];
    tenant?: string | null;
  }

  interface CreatedInfo {
    snapshot: SnapshotInfo;
    trajectory: TrajectoryInfo;
  }

  interface CreatedTokenInfo {
    info: TokenInfo;
    token: string;
  }

  interface DamagedOutput {
    bytes: number | null;
    hash: string;
    output: "stdout" | "stderr" | "output";
  }

  interface DecisionFields {
    action: "retry" | "skip" | "result";
    call: string;
    result?: unknown;
  }

  interface DenyRequest {
    by?: string | null;
    reason?: string | null;
  }

  interface DrainRequest {
    draining?: boolean;
    node: string;
  }

  interface EditFields {
    add_messages?: (MessageFields)[];
    drop_messages?: number;
    files?: (FileFields)[];
    messages?: (MessageFields)[] | null;
    result?: unknown;
    state?: Record<string, unknown>;
  }

  interface EditRequest {
    add_messages?: (MessageFields)[];
    drop_messages?: number;
    env?: Record<string, string>;
    files?: (FileFields)[];
    messages?: (MessageFields)[] | null;
    name?: string | null;
    result?: unknown;
    resume?: boolean;
    state?: Record<string, unknown>;
  }

  interface EffectInfo {
    arguments: unknown;
    call: string;
    compensated: "done" | "failed" | "interrupted" | "timed-out" | "unknown" | null;
    compensation: (string)[] | null;
    name: string;
    result: unknown;
    started_at: string;
    status: "done" | "failed" | "interrupted" | "timed-out" | "unknown" | null;
    trajectory: string;
  }

  interface EndReservationRequest {
    node: string;
    reservation: string;
  }

  interface EnsureImageRequest {
    image: string;
    limits?: LimitsRequest;
  }

  interface EntryInfo {
    gid: number;
    kind: string;
    mode: string;
    size: number;
    uid: number;
  }

  interface ErrorAnswer {
    error: ErrorDetail;
  }

  interface ErrorDetail {
    code: string;
    message: string;
  }

  interface ExecRequest {
    argv: (string)[];
    cwd?: string | null;
    env?: Record<string, string>;
    idle_timeout_s?: number | null;
    if_head?: string | null;
    terminal?: TerminalSize | null;
    timeout_s?: number | null;
    user?: string | null;
  }

  interface ExperimentBranchInfo {
    call_count: number;
    cost: number;
    error: string | null;
    exit_code: number | null;
    file_count: number;
    label: string;
    line_count: number;
    outside: number;
    passed: boolean;
    protected: (string)[];
    run: number;
    score: number | null;
    seconds: number;
    status: "waiting" | "running" | "scored" | "failed" | "stopped" | "skipped";
    tokens: [number, number];
    trajectory: string | null;
  }

  interface ExperimentRequest {
    args?: (string)[] | null;
    best_of?: number | null;
    budget?: SpendingFields | null;
    first_pass?: boolean;
    name: string;
    parallel?: number | null;
    prices?: PriceFields | null;
    protected?: (string)[];
    repeat?: number;
    resume?: boolean;
    score: ScorerFields;
    source: string | SandboxFields;
    stop?: SpendingFields | null;
    variants: (VariantFields)[];
  }

  interface ExperimentState {
    best: string | null;
    branches: (ExperimentBranchInfo)[];
    ended_because: string | null;
    name: string;
    snapshot: string;
    started_at: string;
    variants: (RankedVariant)[];
  }

  interface FileCounts {
    added: number;
    bytes: number;
    changed: number;
    deleted: number;
  }

  interface FileFields {
    content_b64: string | null;
    mode?: number | null;
    path_b64: string;
  }

  interface FileInfo {
    gid: number;
    kind: string;
    mode: string;
    modified_at: string;
    path: string;
    path_b64?: string | null;
    size: number;
    target_b64: string | null;
    uid: number;
  }

  interface FileStatus {
    gid: number;
    kind: string;
    mode: string;
    size: number;
    target_b64: string | null;
    uid: number;
  }

  interface FindInfo {
    hits: (HitInfo)[];
    next: number | null;
    waiting: number;
  }

  interface FleetNodeInfo {
    abilities: (string)[];
    address: string;
    architecture: string;
    cpus: number;
    draining: boolean;
    free_memory_bytes: number;
    lease_s: number;
    node: string;
    promised_cpus: number;
    starting_count: number;
    starting_max: number;
  }

  interface FleetSnapshotInfo {
    node: string;
    published: boolean;
  }

  interface ForgetRequest {
    node: string;
  }

  interface ForkInfo {
    experiment: string;
    trajectories: (TrajectoryInfo)[];
    warnings: (string)[];
  }

  interface ForkQueueRequest {
    args?: (string)[] | null;
    keep_going?: boolean;
    n?: number;
    name?: string | null;
    parallel?: number | null;
    resume?: boolean;
    variants?: (VariantFields)[];
  }

  interface ForkRequest {
    args?: (string)[] | null;
    idle_timeout_s?: number | null;
    n?: number;
    name?: string | null;
    resume?: boolean;
    variants?: (VariantFields)[];
  }

  interface HitInfo {
    created_at: string;
    cut: boolean;
    excerpt: string;
    kind: "argument" | "output" | "message";
    matches: ([number, number])[];
    name: string | null;
    part: string;
    seq: number;
    snapshot: string;
    trajectory: string;
  }

  interface ImageInfo {
    bytes: number;
    created_at: string;
    file_count: number;
    id: string;
    name: string;
    source: string;
  }

  interface ImageRequest {
    name?: string | null;
    source: string;
  }

  interface InputInfo {
    bytes: number;
  }

  interface InputRequest {
    data_b64?: string;
    end?: boolean;
  }

  interface KeepAliveRequest {
    trajectories: (string)[];
  }

  interface LimitsInfo {
    cpus: number;
    disk_bytes: number;
    memory_bytes: number;
    pids: number;
  }

  interface LimitsRequest {
    cpus?: number;
    disk_bytes?: number | null;
    memory_bytes?: number;
    pids?: number;
  }

  interface MakeDirRequest {
    path_b64: string;
    user?: string | null;
  }

  interface MergeInfo {
    base: string;
    changes: (AppliedInfo)[];
    conflicts: (ConflictInfo)[];
    dry_run: boolean;
    head: string;
    same: number;
    snapshot: SnapshotInfo | null;
    source: string;
    warnings: (string)[];
  }

  interface MergeRequest {
    base?: string | null;
    dry_run?: boolean;
    path_b64?: string | null;
    source: string;
  }

  interface MessageFields {
    content: unknown;
    role: string;
  }

  interface MessageInfo {
    content: unknown;
    role: string;
  }

  interface ModelUseInfo {
    cached_tokens: number;
    call_count: number;
    cost_usd: number | null;
    duration_ms: number;
    input_tokens: number;
    output_tokens: number;
  }

  interface MountRequest {
    directory: string;
  }

  interface NetworkInfo {
    network: string;
    refused: (string)[];
    rules: (string)[];
    trajectory: string;
  }

  interface NetworkRequest {
    allow?: (string)[];
    deny?: (string)[];
    only?: (string)[] | null;
  }

  interface NodeStats {
    architecture: string;
    free_memory_bytes: number;
    lease_s: number;
    node: string;
    starting_count: number;
    starting_max: number;
    state: "leased" | "draining" | "lost";
    trajectory_count: number;
    unpublished_count: number;
  }

  interface OverviewInfo {
    file_bytes: number;
    layer_bytes: number;
    model_use: ModelUseInfo;
    newest: SnapshotInfo | null;
    origin: SnapshotInfo | null;
    snapshots: number;
    trajectory: TrajectoryInfo;
  }

  interface PairInfo {
    calls: (AlignedCall)[];
    changes: (ChangeInfo)[];
    first_difference: AlignedCall | null;
  }

  interface PauseMinute {
    began_at: string;
    counts: (number)[];
    longest_ms: number;
    sum_ms: number;
  }

  interface PauseStats {
    bounds_ms: (number)[];
    counts: (number)[];
    minutes: (PauseMinute)[];
    sum_ms: number;
  }

  interface Policy {
    keep_every?: number | null;
    keep_failed?: number | null;
    keep_last?: number | null;
    keep_within_s?: number | null;
    max_bytes?: number | null;
  }

  interface PriceFields {
    input?: number;
    output?: number;
  }

  interface PromoteRequest {
    compensate?: boolean;
    into?: string | null;
    leave_behind?: boolean;
  }

  interface Provider {
    api_key?: string | null;
    base_url?: string | null;
    kind: "openai" | "anthropic" | "gemini";
  }

  interface PruneRequest {
    dry_run?: boolean;
    grace_s?: number;
    policy?: Policy | null;
  }

  interface PutValueRequest {
    expected_version?: number | null;
    ttl_s?: number | null;
    value: unknown;
  }

  interface RankedVariant {
    label: string;
    pass_at: Record<string, number>;
    passes: number;
    rank: number | null;
    score: number | null;
    standard_error: number | null;
  }

  interface RemoveFileRequest {
    path_b64: string;
  }

  interface RenameFileRequest {
    path_b64: string;
    to_b64: string;
  }

  interface RequestStats {
    count: number;
    operation: string;
    status: string;
    sum_ms: number;
  }

  interface ReservationInfo {
    reservation: string;
  }

  interface ReserveRequest {
    count: number;
    memory_bytes: number;
    node: string;
  }

  interface RestoreInfo {
    bytes: number;
    directories: number;
    file_count: number;
    warnings: (string)[];
  }

  interface RestoreRequest {
    path?: string;
    to: string;
  }

  interface ResumeRequest {
    decisions?: (DecisionFields)[];
  }

  interface RetryRequest {
    compensate?: boolean;
    resume?: boolean;
    task: string;
  }

  interface RewindPreview {
    change_count: number;
    changes: (ChangeInfo)[];
    effects: (EffectInfo)[];
    head: string;
    messages: (MessageInfo)[];
    rewinds: "files" | "conversation" | "both";
    target: string;
    untouched: (string)[];
  }

  interface RewindRequest {
    compensate?: boolean;
    mode?: "files" | "conversation" | "both";
    session?: string | null;
    to: string;
  }

  interface RunAgentRequest {
    agent?: string | null;
    args?: (string)[];
    capture_tokens?: boolean;
    command?: (string)[];
    detach?: boolean;
    env?: Record<string, string>;
    image?: string;
    limits?: LimitsRequest;
    name?: string | null;
    network?: string | null;
    program?: string | null;
    providers?: (Provider)[];
    requirements?: string | null;
    reuse?: boolean;
    reuse_replies?: boolean;
    runtime?: "auto" | "runc" | "docker" | "none";
    secrets?: Record<string, string>;
    services?: string | null;
    tenant?: string;
    user?: string | null;
    workspace?: string | null;
  }

  interface SandboxFields {
    capture_tokens?: boolean;
    env?: Record<string, string>;
    image?: string;
    limits?: LimitsRequest;
    name?: string | null;
    network?: string | null;
    program?: string | null;
    providers?: (Provider)[];
    requirements?: string | null;
    runtime?: "auto" | "runc" | "docker" | "none";
    secrets?: Record<string, string>;
    services?: string | null;
    tenant?: string;
    workspace?: string | null;
  }

  interface SandboxInfo {
    agent_running: boolean;
    container: string;
    pid: number;
    started_at: string;
    trajectory: TrajectoryInfo;
  }

  interface SandboxStats {
    agent_running: boolean;
    cpu_ms: number;
    cpus: number;
    memory_bytes: number;
    name: string | null;
    process_count: number;
    runtime: string;
    started_at: string;
    trajectory: string;
    used_memory_bytes: number;
  }

  interface ScoreRequest {
    argv: (string)[];
    cwd?: string | null;
    each?: boolean;
    env?: Record<string, string>;
    files_b64?: string | null;
    files_path?: string | null;
    junit?: string | null;
    number?: boolean;
    parallel?: number | null;
    refs?: (string)[];
    repeat?: number;
    timeout_s?: number | null;
    user?: string | null;
  }

  interface ScorerFields {
    argv: (string)[];
    cwd?: string | null;
    env?: Record<string, string>;
    files_b64?: string | null;
    files_path?: string | null;
    junit?: string | null;
    number?: boolean;
    timeout_s?: number | null;
    user?: string | null;
  }

  interface SearchRequest {
    after?: string;
    limit?: number;
    namespace: string;
    prefix?: string;
    tenant?: string;
    where?: Record<string, string | number | number | boolean | null>;
  }

  interface ServiceOptions {
    name: string;
    port?: number | null;
    ready?: string | null;
    ready_timeout_s?: number;
    required?: boolean;
    restarts?: number;
  }

  interface SignalRequest {
    signal?: number;
  }

  interface SnapshotInfo {
    created_at: string;
    files: FileCounts | null;
    follows: string | null;
    id: string;
    image: string;
    kind: "call" | "marker" | null;
    layers: number;
    messages: number;
    method: string;
    model_use: ModelUseInfo | null;
    parent: string | null;
    pause_ms: number;
    published: boolean | null;
    refused: (string)[];
    reused: string | null;
    seq: number;
    side_effect: "local" | "idempotent" | "irreversible" | null;
    state: "captured" | "stored" | "lost" | "pruned";
    sub_agent: string | null;
    tags: (string)[];
    tool: Tool;
    trajectory: string;
    warnings: (string)[];
  }

  interface SnapshotRequest {
    if_changed?: boolean;
    name?: string | null;
  }

  interface SpendingFields {
    calls?: number | null;
    cost?: number | null;
    seconds?: number | null;
    tokens?: number | null;
  }

  interface StatsInfo {
    began_at: string;
    disk: (TrajectoryDisk)[];
    measured_at: string;
    nodes: (NodeStats)[];
    pauses: PauseStats;
    requests: (RequestStats)[];
    sandboxes: (SandboxStats)[];
    usage: UsageInfo;
    watchers: number;
  }

  interface TagRequest {
    move?: boolean;
    ref: string;
  }

  interface TaggedInfo {
    name: string;
    snapshot: string;
  }

  interface TaskInfo {
    depends: (string)[];
    ended_in: string | null;
    name: string;
    note: string | null;
    started_in: string | null;
    status: string;
  }

  interface TerminalSize {
    columns: number;
    rows: number;
  }

  interface TokenInfo {
    created_at: string;
    expires_at: string | null;
    has_expired: boolean;
    name: string;
    scopes: (string)[];
    tenant: string | null;
    token_id: string;
  }

  interface Tool {
    arguments: unknown;
    damaged: (DamagedOutput)[];
    duration_ms: number;
    error: string | null;
    exit_code: number | null;
    name: string;
    outputs: ("stdout" | "stderr" | "output")[];
    started_at: string;
    status: "done" | "failed" | "interrupted" | "timed-out" | "unknown";
  }

  interface TrajectoryDisk {
    file_bytes: number;
    layer_bytes: number;
    name: string | null;
    trajectory: string;
  }

  interface TrajectoryInfo {
    agent: AgentInfo | null;
    created_at: string;
    exit_code: number | null;
    experiment: string | null;
    forked_from: string | null;
    head: string;
    id: string;
    image: string;
    limits: LimitsInfo;
    name: string | null;
    network: string;
    runtime: string;
    status: "running" | "stopped" | "finished" | "failed" | "interrupted";
  }

  interface UsageInfo {
    cache_budget_bytes: number;
    cache_bytes: number;
    layer_budget_bytes: number;
    layer_bytes: number;
    repository_bytes: number;
    spool_bytes: number;
    states: Record<string, number>;
    unarchived: number;
  }

  interface ValueInfo {
    created_at: string;
    expires_at: string | null;
    is_deleted: boolean;
    key: string;
    namespace: string;
    tenant: string;
    value: unknown;
    version: number;
  }

  interface VariantFields {
    args?: (string)[] | null;
    edit?: EditFields | null;
    env?: Record<string, string>;
    label: string;
    limits?: LimitsRequest | null;
    model?: string | null;
    name?: string | null;
    network?: string | null;
    secrets?: Record<string, string>;
  }

  interface VersionInfo {
    api_version: string;
    pid: number;
    state_dir: string;
    version: string;
  }
}
