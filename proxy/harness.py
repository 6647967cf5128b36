"""Which program a call came from, by its `User-Agent`: a name out of a fixed set, whatever clients write."""

from collections.abc import Iterable

UNNAMED = ""
OTHER = "other"

_HARNESSES = (
    ("codex", "codex"),
    ("claude-cli", "claude-code"),
    ("claude-code", "claude-code"),
    ("opencode", "opencode"),
    ("openhands", "openhands"),
    ("litellm", "litellm"),
    ("langchain", "langchain"),
    ("agents/", "openai-agents"),
    ("pydantic-ai", "pydantic-ai"),
    ("strands", "strands"),
    ("google-adk", "google-adk"),
    ("crewai", "crewai"),
    ("mini-swe-agent", "mini-swe-agent"),
    ("qwen", "qwen-code"),
    ("gemini", "gemini-cli"),
    ("cline", "cline"),
    ("aider", "aider"),
    ("ai-sdk", "ai-sdk"),
    ("openai/python", "openai-python"),
    ("openai/js", "openai-node"),
    ("anthropic/python", "anthropic-python"),
    ("anthropic/js", "anthropic-node"),
    ("python-httpx", "httpx"),
    ("aiohttp", "aiohttp"),
    ("python-requests", "requests"),
    ("curl", "curl"),
)
"""What a user agent contains, in lower case, and the name it gets. The more telling ones come first: many a
harness names the library that it calls with as well."""

HARNESSES = frozenset(name for _, name in _HARNESSES) | {OTHER}


def harness_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The class of a request's sender; `UNNAMED` without a user agent, `OTHER` for one that is not known."""
    agent = next((value for name, value in headers if name == b"user-agent"), b"").decode("latin-1").lower()
    if not agent:
        return UNNAMED
    return next((name for part, name in _HARNESSES if part in agent), OTHER)
