"""What harnesses say of a call in their own headers and fields: which context it is of, and what it is for.

Nothing here ever fails a call: what cannot be read is left out, and reported in words where it is more than
absent. Which of several harnesses' names counts is a matter of order, the most deliberate first.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec

from lifecycle.vocabulary import IdentityRung
from proxy.engine_connection import Headers
from proxy.harness_contexts import (
    claude_code_context,
    codex_context,
    deepseek_context,
    dynamo_context,
    session_context,
)

DYNAMO_SESSION = "x-dynamo-session-id"
DYNAMO_PARENT = "x-dynamo-parent-session-id"
DYNAMO_FINAL = "x-dynamo-session-final"
CLAUDE_CODE_SESSION = "x-claude-code-session-id"
CLAUDE_CODE_AGENT = "x-claude-code-agent-id"
CLAUDE_CODE_PARENT_AGENT = "x-claude-code-parent-agent-id"
CODEX_THREAD = "thread-id"
CODEX_SESSION = "session-id"
CODEX_PARENT_THREAD = "x-codex-parent-thread-id"
CODEX_WINDOW = "x-codex-window-id"
CODEX_SUBAGENT = "x-openai-subagent"
CODEX_TURN = "x-codex-turn-metadata"
SESSION = "x-session-id"
PARENT_SESSION = "x-parent-session-id"
DEEPSEEK_SESSION = "x-deepseek-harness-session-id"
AGENTIC_CONTEXT = "vllm_xargs.agentic_context"

_NAMES = frozenset(
    name.encode()
    for name in (
        *(DYNAMO_SESSION, DYNAMO_PARENT, DYNAMO_FINAL),
        *(CLAUDE_CODE_SESSION, CLAUDE_CODE_AGENT, CLAUDE_CODE_PARENT_AGENT),
        *(CODEX_THREAD, CODEX_SESSION, CODEX_PARENT_THREAD, CODEX_WINDOW, CODEX_SUBAGENT, CODEX_TURN),
        *(SESSION, PARENT_SESSION, DEEPSEEK_SESSION),
    )
)
_GROUP_HEADERS = ("x-litellm-session-id", "x-session-affinity", "x-affinity")
_GROUP_FIELDS = ("prompt_cache_key", "session_id", "user")
_GROUP_NAMES = frozenset(name.encode() for name in _GROUP_HEADERS)
_LOOKED_AT = _NAMES | _GROUP_NAMES

MAX_METADATA_BYTES = 16 * 1024
_TRUE = frozenset({"1", "true", "yes", "?1"})
_FALSE = frozenset({"0", "false", "no", "?0", ""})
_COMPACTS = frozenset({"compact", "compaction"})
_ONE_TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

Groups: TypeAlias = tuple[tuple[str, bytes], ...]
"""Session-level keys, the most telling first: which key, and a digest of what it says."""


class HarnessCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness says of a call; empty where it says nothing.

    `told_by` is the header or field that named `context_id`. `parent` is the context that began this one,
    `forks` says that this one begins with the parent's history. `compacts` says that the call asks for a
    summary of the context, `probes` that it asks for no more than a token, `final` that the context is over
    with it. `window` numbers the histories of the context: another one means that it was replaced. `groups`
    are keys that several contexts may share.
    """

    rung: IdentityRung = IdentityRung.NEW
    context_id: str = ""
    told_by: str = ""
    parent: str = ""
    forks: bool = False
    resumes: bool = False
    compacts: bool = False
    probes: bool = False
    final: bool = False
    window: str = ""
    groups: Groups = ()
    errors: tuple[str, ...] = ()


NOTHING_SAID = HarnessCall()


def read_harness_call(headers: Headers, document: Mapping[str, Any]) -> HarnessCall:
    """What a request's headers (names in lower case) and its decoded body say."""
    said: dict[str, str] = {}
    for name, value in headers:
        if name in _LOOKED_AT:
            said.setdefault(name.decode(), value.decode("utf-8", "replace").strip())
    groups = _groups(said, document)
    errors: list[str] = []
    named = (
        _dynamo(said)
        or _claude_code(said)
        or _codex(said, errors)
        or _session(said)
        or _agentic_context(document, errors)
    )
    if named is None:
        return HarnessCall(groups=groups, errors=tuple(errors)) if groups or errors else NOTHING_SAID
    final = _flag(DYNAMO_FINAL, said.get(DYNAMO_FINAL, ""), errors) or named.final
    probes = any(document.get(field) == 1 for field in _ONE_TOKEN_FIELDS)
    return msgspec.structs.replace(named, final=final, probes=probes, groups=groups, errors=tuple(errors))


def groups_differ(one: Groups, other: Groups) -> bool:
    """Whether the strongest key that both sides name tells them apart."""
    if not one or not other:
        return False
    theirs = dict(other)
    for key, value in one:
        if key in theirs:
            return theirs[key] != value
    return False


def _dynamo(said: Mapping[str, str]) -> HarnessCall | None:
    session, parent = said.get(DYNAMO_SESSION), said.get(DYNAMO_PARENT)
    if not session:
        return None
    return HarnessCall(
        rung=IdentityRung.DYNAMO,
        context_id=dynamo_context(session),
        told_by=DYNAMO_SESSION,
        parent=dynamo_context(parent) if parent else "",
    )


def _claude_code(said: Mapping[str, str]) -> HarnessCall | None:
    session, agent = said.get(CLAUDE_CODE_SESSION), said.get(CLAUDE_CODE_AGENT, "")
    if not session:
        return None
    return HarnessCall(
        rung=IdentityRung.CLAUDE_CODE,
        context_id=claude_code_context(session, agent),
        told_by=CLAUDE_CODE_AGENT if agent else CLAUDE_CODE_SESSION,
        parent=claude_code_context(session, said.get(CLAUDE_CODE_PARENT_AGENT, "")) if agent else "",
    )


def _codex(said: Mapping[str, str], errors: list[str]) -> HarnessCall | None:
    turn = _object(CODEX_TURN, said.get(CODEX_TURN, ""), errors)
    session = said.get(CODEX_SESSION, "")
    thread, told_by = said.get(CODEX_THREAD, ""), CODEX_THREAD
    if not thread:
        thread, told_by = _text(turn, "thread_id"), CODEX_TURN
    if not thread:
        thread, told_by = session, CODEX_SESSION
    if not thread:
        return None
    parent = said.get(CODEX_PARENT_THREAD) or _text(turn, "parent_thread_id") or session
    begins = _text(turn, "history_initialization")
    return HarnessCall(
        rung=IdentityRung.CODEX,
        context_id=codex_context(thread),
        told_by=told_by,
        parent=codex_context(parent) if parent and parent != thread else "",
        forks=begins == "warm_fork",
        resumes=begins == "cold_resume",
        compacts=_text(turn, "request_kind") in _COMPACTS or said.get(CODEX_SUBAGENT) in _COMPACTS,
        window=said.get(CODEX_WINDOW) or _text(turn, "context_window_id"),
    )


def _session(said: Mapping[str, str]) -> HarnessCall | None:
    session, parent = said.get(SESSION), said.get(PARENT_SESSION)
    if session:
        return HarnessCall(
            rung=IdentityRung.SESSION,
            context_id=session_context(session),
            told_by=SESSION,
            parent=session_context(parent) if parent and parent != session else "",
        )
    session = said.get(DEEPSEEK_SESSION)
    if not session:
        return None
    return HarnessCall(
        rung=IdentityRung.SESSION, context_id=deepseek_context(session), told_by=DEEPSEEK_SESSION
    )


def _agentic_context(document: Mapping[str, Any], errors: list[str]) -> HarnessCall | None:
    extra = document.get("vllm_xargs")
    given = extra.get("agentic_context") if isinstance(extra, dict) else None
    if given is None:
        return None
    if isinstance(given, str):
        given = _object(AGENTIC_CONTEXT, given, errors)
    if not isinstance(given, dict):
        errors.append(f"{AGENTIC_CONTEXT}: not an object")
        return None
    session, parent = _text(given, "session_id"), _text(given, "parent_session_id")
    if not session:
        return None
    return HarnessCall(
        rung=IdentityRung.SESSION,
        context_id=session_context(session),
        told_by=AGENTIC_CONTEXT,
        parent=session_context(parent) if parent and parent != session else "",
        final=given.get("session_final") is True,
    )


def _groups(said: Mapping[str, str], document: Mapping[str, Any]) -> Groups:
    found: list[tuple[str, object]] = [(name, said.get(name)) for name in _GROUP_HEADERS]
    found += [(name, document.get(name)) for name in _GROUP_FIELDS]
    metadata = document.get("metadata")
    if isinstance(metadata, dict):
        found.append(("metadata.user_id", metadata.get("user_id")))
    return tuple((name, _digest(value)) for name, value in found if isinstance(value, str) and value)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _object(name: str, text: str, errors: list[str]) -> Mapping[str, Any]:
    if not text:
        return {}
    if len(text) > MAX_METADATA_BYTES:
        errors.append(f"{name}: longer than {MAX_METADATA_BYTES} bytes")
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        errors.append(f"{name}: no JSON")
        return {}
    if not isinstance(document, dict):
        errors.append(f"{name}: not an object")
        return {}
    return document


def _text(document: Mapping[str, Any], field: str) -> str:
    value = document.get(field)
    return value if isinstance(value, str) else ""


def _flag(name: str, text: str, errors: list[str]) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        errors.append(f"{name}: neither true nor false")
    return text.lower() in _TRUE
