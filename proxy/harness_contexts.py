"""Names of contexts that harnesses number themselves: one name, whoever tells it (a call, a hook).

A name is the harness and its own id. Characters that no context id may have are percent-encoded, and an id
that is too long is hashed, so that different ids never share a name.
"""

from hashlib import blake2b

from proxy.operations import is_context_id

_HASH_BYTES = 20


def codex_context(thread_id: str) -> str:
    """The context of a Codex thread; a subagent is a thread of its own."""
    return _named("codex", thread_id)


def claude_code_context(session_id: str, agent_id: str = "") -> str:
    """The context of a Claude Code session's main agent, or of one of its subagents."""
    return _named("claude-code", *filter(None, (session_id, agent_id)), apart=":")


def dynamo_context(session_id: str) -> str:
    """The context of a session in Dynamo's headers."""
    return _named("dynamo", session_id)


def session_context(session_id: str) -> str:
    """The context of an `x-session-id`, whoever sends it: opencode, clients of vLLM."""
    return _named("session", session_id)


def deepseek_context(session_id: str) -> str:
    """The context of a session of DeepSeek's harness."""
    return _named("deepseek", session_id)


def _named(harness: str, *ids: str, apart: str = "") -> str:
    """`apart` are the characters that part ids: none may have them of its own."""
    name = ":".join([harness, *(_encoded(each, apart) for each in ids)])
    if is_context_id(name):
        return name
    digest = blake2b("\0".join(ids).encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return f"{harness}:~{len(ids)}:{digest.hexdigest()}"


def _encoded(text: str, also: str) -> str:
    return "".join(
        char
        if char.isprintable() and char not in "%/" + also
        else "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        for char in text
    )
