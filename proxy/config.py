"""Configuration: one frozen value, from `kvtether.yaml`, environment and flags, in rising order.

Secrets never stand in the file: a field that ends in `_env` names the environment variable that holds one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lifecycle.vocabulary import Mode
from proxy.auth import ApiKey, KeyScope
from proxy.normalisers import Normaliser

ENVIRONMENT_PREFIX = "KVTETHER_"
"""`KVTETHER_UPSTREAM__URL` sets `upstream.url`: two underscores step into a section. A value in brackets or
braces is YAML, any other is taken as it stands."""

ADMIN_KEY_VARIABLE = "KVTETHER_ADMIN_KEY"
"""The command line's own key, no setting."""

DEFAULT_FILE = Path("kvtether.yaml")

MAX_BACKENDS = 64
"""Engines behind one proxy: each has metrics of its own."""

DEFAULT_KEYS_FILE = "kvtether.keys.json"
"""Where keys are kept unless the configuration names another file."""


class InvalidConfig(Exception):
    """The configuration cannot be used; the message names the field and the fix."""


def _doc(text: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **limits)


class Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to listen."""

    host: Annotated[str, _doc("Address to bind.")] = "127.0.0.1"
    port: Annotated[int, _doc("TCP port; 0 picks a free one.", ge=0, le=65535)] = 8700


class AdminListener(Listener, frozen=True, forbid_unknown_fields=True):
    """Where the admin API listens."""

    port: Annotated[int, _doc("TCP port; 0 picks a free one.", ge=0, le=65535)] = 8701


class UpstreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine behind us."""

    url: Annotated[
        str, _doc("Base URL of the engine, with or without `/v1`; or `unix:/path` of its socket.")
    ] = "http://127.0.0.1:8000"
    api_key_env: Annotated[
        str, _doc("Environment variable with the engine's own key; empty forwards the client's.")
    ] = ""
    connect_seconds: Annotated[float, _doc("Time limit for a connection.", gt=0)] = 10.0
    max_connections: Annotated[
        int,
        _doc("Calls under way on one engine at a time; more wait for `connect_seconds`, then 503.", ge=1),
    ] = 4096
    first_byte_seconds: Annotated[float, _doc("Time limit until the answer begins.", gt=0)] = 600.0
    idle_seconds: Annotated[float, _doc("Time limit between two pieces of an answer.", gt=0)] = 300.0
    max_body_bytes: Annotated[int, _doc("Largest request body; larger ones answer 413.", gt=0)] = 512 << 20


class BackendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several engines. What `upstream` says besides its `url` holds for each of them."""

    name: Annotated[
        str,
        _doc(
            "What logs, metrics and `kvtether backends` call it.",
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        ),
    ]
    url: Annotated[str, _doc("Base URL of the engine, with or without `/v1`; or `unix:/path` of its socket.")]
    api_key_env: Annotated[
        str, _doc("Environment variable with this engine's own key; empty takes that of `upstream`.")
    ] = ""
    events_endpoint: Annotated[
        str, _doc("ZMQ endpoint of its KV events. Without it generated text stays in the cache.")
    ] = ""
    replay_endpoint: Annotated[str, _doc("ZMQ endpoint where it replays events that were missed.")] = ""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model whose messages are mapped to tokens."""

    path: Annotated[str, _doc("Directory with the tokenizer and chat template of the engine's revision.")]
    name: Annotated[str, _doc("Name that clients send as `model`; empty takes the engine's first.")] = ""
    chat_template_kwargs: Annotated[
        dict[str, Any], _doc("The engine's `--default-chat-template-kwargs`, if it has any.")
    ] = {}
    normalise: Annotated[
        tuple[Normaliser, ...] | None, _doc("This model's own, in place of the common `normalise`.")
    ] = None


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache behind the engine."""

    driver: Annotated[
        Literal["lmcache_mp", "none"],
        _doc("`lmcache_mp`: LMCache servers with a coordinator. `none`: level 0."),
    ] = "none"
    coordinator_url: Annotated[str, _doc("LMCache coordinator.")] = "http://127.0.0.1:9300"
    events_endpoint: Annotated[
        str, _doc("ZMQ endpoint of the engine's KV events. Without it generated text stays in the cache.")
    ] = ""
    replay_endpoint: Annotated[
        str, _doc("ZMQ endpoint where the engine replays events that were missed.")
    ] = ""
    chunk_size: Annotated[int, _doc("LMCache's `--chunk-size`; 0 asks the cache.", ge=0)] = 0
    l2_pins: Annotated[
        bool, _doc("Hold pins in L2 by the coordinator. They outlive us: `kvtether release-all` gives back.")
    ] = False


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key and what it may do. Give the key's environment variable or its SHA-256 in hex."""

    tenant: Annotated[str, _doc("Whose calls these are.")]
    key_env: Annotated[str, _doc("Environment variable with the key.")] = ""
    key_sha256: Annotated[str, _doc("SHA-256 of the key, hex.")] = ""
    admin: Annotated[bool, _doc("May use the admin API and the engine's admin paths.")] = False


_Count = Annotated[int, msgspec.Meta(ge=0)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tenant may have. None is no limit."""

    concurrent_calls: Annotated[
        _Count | None, _doc("Calls of a tenant under way at a time; more answer 429.")
    ] = None
    contexts: Annotated[
        _Count | None,
        _doc("Open contexts; a call that would open one more is served as a one-off."),
    ] = None
    ops_per_minute: Annotated[_Count | None, _doc("Declared operations; more are rejected.")] = None
    branches: Annotated[
        _AtLeastOne | None,
        _doc("Branches of one context; beyond it the one silent longest expires."),
    ] = None
    pins: Annotated[_Count | None, _doc("Pins held; more are rejected.")] = None
    pinned_bytes: Annotated[
        _Count | None, _doc("Bytes that pins may hold; more are rejected. `null`: no limit.")
    ] = 4 << 30


class OwnLimitsConfig(LimitsConfig, frozen=True, forbid_unknown_fields=True):
    """Limits of one tenant. None is what everybody has."""

    pinned_bytes: Annotated[_Count | None, _doc("Bytes that pins may hold.")] = None


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's own settings."""

    name: Annotated[str, _doc("The tenant.")]
    isolation: Annotated[
        Literal["shared", "salt"],
        _doc(
            "`salt`: a cache salt of its own, from the moment it is read; `shared`: the common cache, for a "
            "tenant that had a salt from the next start."
        ),
    ] = "shared"
    limits: Annotated[OwnLimitsConfig, _doc("This tenant's own; what is unset is as in `limits`.")] = (
        OwnLimitsConfig()
    )


class ModeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mode for one model, tenant, or both. The most specific rule wins."""

    mode: Annotated[Mode, _doc("`bypass`, `observe` or `enforce`.")]
    model: Annotated[str, _doc("Empty: every model.")] = ""
    tenant: Annotated[str, _doc("Empty: every tenant.")] = ""


class HarmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When too much that was removed is needed again: that model and tenant then only observe."""

    share: Annotated[
        float, _doc("Share of prompt tokens that may have been removed and be needed again.", ge=0, le=1)
    ] = 0.001
    window_seconds: Annotated[float, _doc("Time over which both are counted.", ge=60, le=86400)] = 3600.0
    floor_prompt_tokens: Annotated[
        int, _doc("Prompt tokens that a quiet window counts as, so that it has an allowance too.", ge=0)
    ] = 1_000_000
    min_calls: Annotated[
        int, _doc("Calls that must have needed removed tokens: fewer never exceed the budget.", ge=1)
    ] = 3


class DrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a proxy ends on SIGTERM. Both together stay below the time after which it would be killed."""

    settle_seconds: Annotated[
        float,
        _doc(
            "Time in which `/readyz` says no and calls are served still: above the balancer's interval.", ge=0
        ),
    ] = 2.0
    finish_seconds: Annotated[float, _doc("Time that calls under way have to finish.", ge=0)] = 30.0


class LoggingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _doc("From this level on. `info` has one line for each call, `debug` one for every request."),
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "console"],
        _doc(
            "`json`: one object a line; `console`: for people; `auto`: `console` on a terminal, else `json`."
        ),
    ] = "auto"


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry traces. `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_RESOURCE_ATTRIBUTES` count as well."""

    endpoint: Annotated[
        str,
        _doc("OTLP collector, over HTTP: `http://host:4318`. Empty: no traces. Needs `kvtether[tracing]`."),
    ] = ""
    sample: Annotated[
        float, _doc("Share of the calls traced that come without a trace of their own.", ge=0, le=1)
    ] = 1.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    data: Annotated[Listener, _doc("The engine's surface, `/kv/v1/ops` and hooks.")] = Listener()
    admin: Annotated[AdminListener, _doc("Health, metrics and the admin API.")] = AdminListener()
    upstream: UpstreamConfig = UpstreamConfig()
    upstreams: Annotated[
        tuple[BackendConfig, ...],
        _doc("Several engines, in place of `upstream.url`.", max_length=MAX_BACKENDS),
    ] = ()
    models: tuple[ModelConfig, ...] = ()
    cache: CacheConfig = CacheConfig()
    mode: Annotated[Mode, _doc("Mode where no rule says otherwise.")] = Mode.OBSERVE
    modes: Annotated[tuple[ModeRule, ...], _doc("Rules for single models and tenants.")] = ()
    holdout: Annotated[
        float, _doc("Share of contexts that stay in observe for an honest comparison.", ge=0, le=1)
    ] = 0.0
    normalise: Annotated[
        tuple[Normaliser, ...],
        _doc(
            "Cut out of requests what keeps prompts from sharing KV: `claude_billing`, `cch_nonce`, "
            "`token_countdown`, `date_in_system` (docs/lint.md says what the model then does not see)."
        ),
    ] = ()
    harm: HarmConfig = HarmConfig()
    drain: DrainConfig = DrainConfig()
    api_keys: Annotated[
        tuple[KeyConfig, ...],
        _doc("Without any, and without a keys file, loopback only, as tenant `default`."),
    ] = ()
    keys_file: Annotated[
        str,
        _doc(
            "Keys made by `kvtether keys create`, hashed. Empty: "
            f"`{DEFAULT_KEYS_FILE}` in the working directory, if it is there. A named one must be there."
        ),
    ] = ""
    keyless_network: Annotated[
        bool,
        _doc("Serve addresses beyond loopback although there are no keys: everybody who reaches them is in."),
    ] = False
    limits: Annotated[LimitsConfig, _doc("What each tenant may have.")] = LimitsConfig()
    tenants: tuple[TenantConfig, ...] = ()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
    log_url: Annotated[
        str, _doc("The event log: `sqlite:///path`, `redis://host/0?prefix=kvtether`, or `memory:`.")
    ] = "sqlite:///kvtether.db"
    read_models_url: Annotated[
        str,
        _doc(
            "SQL tables for queries and dashboards, kept from the log: `sqlite:///path` or "
            "`postgresql://user@host:5432/database`. Empty: none."
        ),
    ] = ""
    retention_hours: Annotated[
        float,
        _doc(
            "How long events, closed contexts and settled directives are kept. The event log is trimmed of "
            "what is older.",
            ge=1,
            le=87_600,
        ),
    ] = 24.0
    keep_recurring_seconds: Annotated[
        float,
        _doc(
            "How long dead chunks are kept that one agent after the other begins with, like a system prompt "
            "and tool definitions. 0 frees them with the rest.",
            ge=0,
            le=86_400,
        ),
    ] = 600.0
    plan_wait_seconds: Annotated[
        float, _doc("Longest time that a call waits for its plan in enforce.", ge=0, le=1)
    ] = 0.005
    mapping_workers: Annotated[int, _doc("Processes for full renders.", ge=1, le=64)] = 1

    @property
    def salted(self) -> frozenset[str]:
        """Tenants with a cache of their own."""
        return frozenset(tenant.name for tenant in self.tenants if tenant.isolation == "salt")

    @property
    def backends(self) -> tuple[BackendConfig, ...]:
        """Every engine with what it needs. One alone has no name."""
        if self.upstreams:
            key = self.upstream.api_key_env
            return tuple(
                msgspec.structs.replace(each, api_key_env=each.api_key_env or key) for each in self.upstreams
            )
        return (
            BackendConfig(
                name="",
                url=self.upstream.url,
                api_key_env=self.upstream.api_key_env,
                events_endpoint=self.cache.events_endpoint,
                replay_endpoint=self.cache.replay_endpoint,
            ),
        )


def api_key(key: KeyConfig, environment: Mapping[str, str]) -> ApiKey:
    """The key as the authenticator takes it. Raises `InvalidConfig`."""
    secret = f"sha256:{key.key_sha256}" if key.key_sha256 else environment.get(key.key_env, "")
    scopes = frozenset(KeyScope) if key.admin else frozenset({KeyScope.CALL})
    known = ApiKey(key=secret, tenant=key.tenant, scopes=scopes)
    try:
        known.sha256()
    except ValueError as error:
        raise InvalidConfig(f"api_keys: tenant {key.tenant!r}: {error}") from error
    return known


def json_schema() -> dict[str, Any]:
    """JSON schema of `kvtether.yaml`."""
    return msgspec.json.schema(Config)


def check(config: Config) -> None:
    """What no type says. Raises `InvalidConfig`: the field, a colon, and what is wrong."""
    names = [m.name for m in config.models]
    if len(set(names)) != len(names):
        raise InvalidConfig("models: a name stands there twice")
    for key in config.api_keys:
        if bool(key.key_env) == bool(key.key_sha256):
            raise InvalidConfig(f"api_keys: tenant {key.tenant!r} needs either key_env or key_sha256")
    named = [t.name for t in config.tenants]
    if len(set(named)) != len(named):
        raise InvalidConfig("tenants: a name stands there twice")
    engines = [e.name for e in config.upstreams]
    if len(set(engines)) != len(engines):
        raise InvalidConfig("upstreams: a name stands there twice")
    if config.upstreams:
        _check_one_way(config)


def _check_one_way(config: Config) -> None:
    """Engines are named in one place: what stands beside `upstreams` would silently not count."""
    unused = {
        "upstream.url": config.upstream.url != UpstreamConfig().url,
        "cache.events_endpoint": bool(config.cache.events_endpoint),
        "cache.replay_endpoint": bool(config.cache.replay_endpoint),
    }
    for field in (name for name, said in unused.items() if said):
        raise InvalidConfig(f"{field}: each of upstreams has its own, so keep one or the other")
