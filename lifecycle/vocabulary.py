"""Names shared by every part: enumerations, header names, body field names. Standard library only."""

from enum import StrEnum


class VersionState(StrEnum):
    """State of a message version in one context, strongest first."""

    PINNED = "pinned"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DOUBTFUL = "doubtful"
    PENDING = "pending"
    EXPIRED = "expired"
    TEMPORARY = "temporary"


class WaitKind(StrEnum):
    """What an agent waits for between two calls; it decides the length of the context's lease."""

    DECODE = "decode"
    TOOL = "tool"
    HUMAN = "human"
    SUBAGENT = "subagent"
    UNKNOWN = "unknown"


class CallEnd(StrEnum):
    """How a call ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class OutcomeResult(StrEnum):
    """What an agent reports of the work that a span of messages stood for."""

    VERIFIED = "verified"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class OperationStatus(StrEnum):
    """Answer to one operation."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    HELD = "held"
    REJECTED = "rejected"


class Mode(StrEnum):
    """What the proxy may do for one model and tenant."""

    BYPASS = "bypass"
    OBSERVE = "observe"
    ENFORCE = "enforce"


class Arm(StrEnum):
    """How a call ran, for comparison: under control, held out of it by lot, or where nothing is enforced."""

    ENFORCE = "enforce"
    HOLDOUT = "holdout"
    OBSERVE = "observe"


class Tier(StrEnum):
    """A place where KV lies."""

    GPU = "gpu"
    L1 = "l1"
    L2 = "l2"


class MappingKind(StrEnum):
    """How the tokens of a call are known."""

    EXACT = "exact"
    ENGINE_IDS = "engine_ids"
    NONE = "none"


class DirectiveOutcome(StrEnum):
    """Life of a directive, from the plan to the cache's own word."""

    PROPOSED = "proposed"
    SUPPRESSED = "suppressed"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNSUPPORTED = "unsupported"
    APPLIED = "applied"
    FAILED = "failed"
    EXPIRED = "expired"


class PrefixBreak(StrEnum):
    """What made a prompt leave the one before it. `docs/lint.md` says of each what to do.

    From `BILLING` to `COUNTER` the two texts differ in nothing else.
    """

    TOOLS = "tools"
    TOOLS_ORDER = "tools_order"
    SETTINGS = "settings"
    HEAD = "head"
    SYSTEM = "system"
    BILLING = "billing"
    TIMESTAMP = "timestamp"
    COUNTDOWN = "countdown"
    NONCE = "nonce"
    COUNTER = "counter"
    MESSAGE = "message"
    INSERTED = "inserted"
    REMOVED = "removed"
    REPLACED = "replaced"
    SHORTENED = "shortened"
    ANSWER = "answer"
    RENDERED = "rendered"


class IdentityRung(StrEnum):
    """Which rung of the identity ladder named a call's context, the most trusted first."""

    EXPLICIT = "explicit"
    DYNAMO = "dynamo"
    CLAUDE_CODE = "claude_code"
    CODEX = "codex"
    SESSION = "session"
    GROUP = "group"
    LINEAGE = "lineage"
    INFERENCE = "inference"
    NEW = "new"


LIFECYCLE_HEADER = "x-kv-lifecycle"
LIFECYCLE_ERROR_HEADER = "x-kv-lifecycle-error"
LIFECYCLE_BODY_FIELD = "kv_lifecycle"
SESSION_HEADER = "x-kv-session-id"
PARENT_SESSION_HEADER = "x-kv-parent-session-id"
SESSION_FINAL_HEADER = "x-kv-session-final"
CONTEXT_HEADER = "x-kv-context"
CALL_HEADER = "x-kv-call"
MAPPING_HEADER = "x-kv-mapping"
BACKEND_HEADER = "x-kv-backend"
HOOK_HEADER = "x-kv-hook"

KV_TRANSFER_PARAMS = "kv_transfer_params"
MAX_OFFLOAD_TOKENS = "lmcache.max_offload_tokens"
CACHE_SALT = "cache_salt"

LEASE_SECONDS: dict[WaitKind, float] = {
    WaitKind.DECODE: 30 * 60.0,
    WaitKind.TOOL: 15 * 60.0,
    WaitKind.UNKNOWN: 30 * 60.0,
    WaitKind.HUMAN: 60 * 60.0,
    WaitKind.SUBAGENT: 60 * 60.0,
}
"""How long a context that says nothing is kept, by what it waits for."""

PIN_TTL_DEFAULT_SECONDS = 300.0
PIN_TTL_MAX_SECONDS = 3600.0
DOUBT_SECONDS = 60.0
UNTRACKED_RECENT_SECONDS = 30 * 60.0
