"""An agent as people write one, and the proxy that it talks to."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai
from openai.types.chat import ChatCompletion

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.events import ChunksGone, DirectiveProposed, DirectiveSettled, RecordedEvent
from lifecycle.core.ids import ContextKey, Namespace, split_keys
from lifecycle.core.state import ContextState
from lifecycle.ports import CacheControl
from lifecycle.vocabulary import LIFECYCLE_HEADER, DirectiveOutcome, Mode
from proxy.app import Serving, serving
from proxy.config import Config, Listener
from proxy.local import local_config
from tests.e2e.engine_cache import PLAIN, Cache, Message
from tests.e2e.polling import NUM_POLLS, POLL_SECONDS, SECONDS

T = TypeVar("T")


def prose(num_words: int) -> str:
    """Text nobody sent before: four to five tokens a word."""
    return " ".join(secrets.token_hex(3) for _ in range(num_words))


def tool(name: str) -> Message:
    """A tool whose description nobody sent before."""
    path = {"type": "string", "enum": ["a.py", "b.py"]}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    function = {"name": name, "description": prose(12), "parameters": parameters}
    return {"type": "function", "function": function}


def calls_tool(name: str, path: str = "a.py") -> dict[str, Any]:
    """Body fields that make a model of random weights call a tool: this is all it may say."""
    said = f'<tool_call>\n{{"name": "{name}", "arguments": {{"path": "{path}"}}}}\n</tool_call>'
    return {"structured_outputs": {"choice": [said]}}


class World:
    """One proxy before the stack, everything heard of it, and the bodies that its agents `sent`.

    All of it with the API key of one tenant.
    """

    def __init__(self, up: Serving, cache: Cache, tenant: str = "default", api_key: str = "any") -> None:
        self.up = up
        self.tenant = tenant
        self.runtime = up.runtime
        self.cache = cache
        self.heard: list[RecordedEvent] = []
        bearer = {"authorization": f"Bearer {api_key}"}
        self.http = httpx.AsyncClient(timeout=120.0, trust_env=False, headers=bearer)
        self.sent: list[bytes] = []
        self.client = openai.AsyncOpenAI(
            base_url=f"{up.data_url}/v1",
            api_key=api_key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=False, event_hooks={"request": [self._note_sent]}
            ),
        )
        self._changed = asyncio.Event()
        self._ids = count(1)
        self._name = secrets.token_hex(4)
        self.runtime.tracker.listeners.append(self._hear)

    async def _note_sent(self, request: httpx.Request) -> None:
        self.sent.append(request.content)

    def _hear(self, batch: Sequence[RecordedEvent]) -> None:
        self.heard += batch
        self._changed.set()

    async def until(self, what: Callable[[], T], seconds: float = SECONDS) -> T:
        """Wait for events until the answer is true; answers it."""
        try:
            async with asyncio.timeout(seconds):
                while not (found := what()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            recent = "\n".join(str(each.event)[:300] for each in self.heard[-25:])
            raise AssertionError(f"waited {seconds} s in vain; heard last:\n{recent}") from None
        return found

    def agent(self, name: str = "", system: str = "", tools: Sequence[Message] = ()) -> "Agent":
        """An agent with a context of its own and, unless given, a system prompt nobody else has."""
        ctx = f"{self._name}:{name or 'agent'}-{next(self._ids)}"
        return Agent(self, ctx, [{"role": "system", "content": system or prose(70)}], list(tools))

    def state(self, ctx: str) -> ContextState | None:
        return self.runtime.tracker.contexts.latest(ContextKey(self.tenant, ctx))

    @property
    def namespace(self) -> Namespace:
        return self.runtime.tracking.namespace(self.cache.stack.options.model_name, "")

    async def view(self, ctx: str) -> dict[str, Any]:
        """What the admin API shows of a context."""
        listed = await self.http.get(f"{self.up.admin_url}/kv/v1/contexts", params={"ctx": ctx})
        uid = listed.json()["items"][0]["uid"]
        return dict((await self.http.get(f"{self.up.admin_url}/kv/v1/contexts/{uid}")).json())

    async def directives(self) -> list[dict[str, Any]]:
        """What the admin API shows of the directives, newest first."""
        reply = await self.http.get(f"{self.up.admin_url}/kv/v1/directives", params={"limit": 1000})
        return list(reply.json()["items"])

    def events(self, kind: type[T]) -> list[T]:
        """Events of one kind, in order."""
        return [each.event for each in self.heard if isinstance(each.event, kind)]

    def asked(self, kind: type[Reclaim] | type[Demote]) -> set[bytes]:
        """Keys that some directive of the kind asked for."""
        directives = [e.directive for e in self.events(DirectiveProposed)]
        return {key for d in directives if isinstance(d, kind) for key in split_keys(d.keys)}

    def outcomes(self, keys: Sequence[bytes]) -> dict[bytes, list[DirectiveOutcome]]:
        """What became of the directives that named each key."""
        results = {e.directive_id: e.result.outcome for e in self.events(DirectiveSettled)}
        found: dict[bytes, list[DirectiveOutcome]] = {key: [] for key in keys}
        for event in self.events(DirectiveProposed):
            directive = event.directive
            outcome = results.get(directive.directive_id)
            if isinstance(directive, Reclaim | Demote) and outcome is not None:
                for key in split_keys(directive.keys):
                    if key in found:
                        found[key].append(outcome)
        return found

    async def until_settled(self, keys: Sequence[bytes], outcome: DirectiveOutcome) -> None:
        """Until a directive about each of the keys came to this outcome."""
        await self.until(lambda: all(outcome in got for got in self.outcomes(keys).values()))

    def gone(self) -> set[bytes]:
        """Keys that some directive freed, or that were seen to be gone, by looks into the directory."""
        freed = {key for e in self.events(DirectiveSettled) for key in split_keys(e.result.gone)}
        return freed | {key for e in self.events(ChunksGone) for key in split_keys(e.keys)}

    async def until_gone(self, keys: Sequence[bytes]) -> None:
        """Until directives freed all of the keys."""
        try:
            await self.until(lambda: self.gone() >= set(keys))
        except AssertionError as error:
            index = self.runtime.tracker.contexts.index
            left = [key for key in keys if key not in self.gone()]
            books = [index.describe(self.namespace, key) for key in left]
            places = await self.cache.where(left)
            raise AssertionError(f"{len(left)} of {len(keys)} not freed: {books[:5]}, {places}") from error

    async def until_confirmed(self, keys: Sequence[bytes], salt: str = "") -> None:
        """Until the proxy itself has seen each of the keys in the cache."""
        index = self.runtime.tracker.contexts.index
        namespace = msgspec.structs.replace(self.namespace, salt=salt)
        await self.until(lambda: not index.unverified(namespace, b"".join(keys)))

    async def sweep(self, outcome: DirectiveOutcome = DirectiveOutcome.APPLIED) -> None:
        """Until a fresh agent's chunks died and were dealt with: whatever was dead before was, too."""
        witness = self.agent("witness")
        await witness.say("hello")
        keys = await witness.keys()
        await self.until_confirmed(keys)
        await witness.ops({"op": "close"})
        await self.until_settled(keys, outcome)

    async def ops(self, source: str, *operations: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Declare operations; answers each one's verdict."""
        body = {"source": source, "ops": list(operations)}
        reply = await self.http.post(f"{self.up.data_url}/kv/v1/ops", json=body)
        reply.raise_for_status()
        return list(reply.json()["results"])

    async def close(self) -> None:
        await self.client.close()
        await self.http.aclose()


class Agent:
    """A message list, and calls that send it.

    Of the last call: `asked` is its list, `ids` what its choices generated, `reply` the answer.
    """

    def __init__(self, world: World, ctx: str, messages: list[Message], tools: list[Message]) -> None:
        self.world = world
        self.ctx = ctx
        self.messages = messages
        self.tools = tools
        self.asked: list[Message] = []
        self.ids: list[list[int]] = []
        self.reply: ChatCompletion | None = None
        self._seq = count(1)

    async def call(
        self, max_tokens: int = 1, body: Mapping[str, Any] | None = None, **fields: Any
    ) -> Message:
        """Send the list; answers the reply as an agent puts it into its list. `fields` go into the header."""
        self.asked = list(self.messages)
        reply = await self.world.client.chat.completions.create(
            model=self.world.cache.stack.options.model_name,
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            extra_headers=lifecycle(ctx=self.ctx, **fields),
            extra_body={"return_token_ids": True, **PLAIN, **(body or {})},
            **({"tools": self.tools} if self.tools else {}),  # type: ignore[arg-type]
        )
        self.reply = reply
        self.ids = [list((choice.model_extra or {})["token_ids"]) for choice in reply.choices]
        return echoed(reply)

    def fork(self, name: str = "child") -> "Agent":
        """Another agent with a copy of the list and a context of its own."""
        child = self.world.agent(name, system=self.messages[0]["content"], tools=self.tools)
        child.messages = list(self.messages)
        return child

    @asynccontextmanager
    async def streaming(
        self, max_tokens: int, body: Mapping[str, Any] | None = None, hang_up_at: int = 1, **fields: Any
    ) -> AsyncIterator[None]:
        """A streamed call whose first `hang_up_at` tokens are here.

        Leaving the block reads the rest; if 1 was not enough, it hangs up instead.
        """
        self.asked = list(self.messages)
        stream = await self.world.client.chat.completions.create(
            model=self.world.cache.stack.options.model_name,
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=lifecycle(ctx=self.ctx, **fields),
            extra_body={"return_token_ids": True, **PLAIN, **(body or {})},
        )
        self.ids = [[]]
        pieces = stream.__aiter__()

        def heard(piece: Any) -> None:
            for choice in piece.choices:
                self.ids[0] += (choice.model_extra or {}).get("token_ids") or []

        while len(self.ids[0]) < hang_up_at:
            heard(await anext(pieces))
        yield
        if hang_up_at > 1:
            await stream.close()
            return
        async for piece in pieces:
            heard(piece)

    async def say(self, text: str, max_tokens: int = 1, **fields: Any) -> Message:
        """A user's turn: the list grows by the question and by the answer."""
        self.messages.append({"role": "user", "content": text})
        answer = await self.call(max_tokens, **fields)
        self.messages.append(answer)
        return answer

    async def use_tool(self, name: str, result: str, **fields: Any) -> Message:
        """The model calls a tool; the call and its result go into the list."""
        answer = await self.call(64, calls_tool(name), **fields)
        calls = answer["tool_calls"]
        self.messages.append(answer)
        self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
        return answer

    async def ops(self, *operations: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Declare operations on this context; all must be applied."""
        numbered = [{"ctx": self.ctx, "seq": next(self._seq), **op} for op in operations]
        results = await self.world.ops(f"agent {self.ctx}", *numbered)
        assert [r["status"] for r in results] == ["applied"] * len(results), results
        return results

    async def keys(self) -> list[bytes]:
        """Chunk keys of the last call's prompt."""
        return await self.world.cache.keys(self.asked, self.tools)

    async def stored_keys(self) -> list[bytes]:
        """Chunk keys of what the last call computed, its first choice included; the last token has no KV."""
        prompt = await self.world.cache.tokens(self.asked, self.tools)
        return await self.world.cache.keys_of([*prompt, *self.ids[0][:-1]])

    @property
    def cached_tokens(self) -> int:
        """Tokens of the last prompt that the engine had not to compute."""
        assert self.reply is not None
        assert self.reply.usage is not None
        details = self.reply.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


def echoed(reply: ChatCompletion) -> Message:
    """A reply as it goes back into the list."""
    message = reply.choices[0].message
    echo: Message = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        echo["tool_calls"] = [
            {"id": c.id, "type": "function", "function": c.to_dict()["function"]} for c in message.tool_calls
        ]
    return echo


def lifecycle(**fields: Any) -> dict[str, str]:
    """The header a call carries. Spans are lists of strings, parameters of a list a pair with it."""
    members = []
    for name, value in fields.items():
        if value is True:
            members.append(name)
        elif name in ("waiting",):
            members.append(f"{name}={value}")
        elif isinstance(value, tuple):
            spans, ttl = value
            members.append(f"{name}=({' '.join(json.dumps(s) for s in spans)});ttl={ttl}")
        elif isinstance(value, list):
            members.append(f"{name}=({' '.join(json.dumps(s) for s in value)})")
        else:
            members.append(f"{name}={json.dumps(value)}")
    return {LIFECYCLE_HEADER: ", ".join(members)}


def config_for(stack: EngineStack, folder: Path, mode: Mode = Mode.ENFORCE, **changes: Any) -> Config:
    """The proxy of `make run`, on free ports, with time enough for its plans on a busy machine, and with
    nothing dead kept because it may come back."""
    config = local_config(stack, folder, mode)
    free = Listener(port=0)
    fixed = {"data": free, "admin": free, "plan_wait_seconds": 1.0, "keep_recurring_seconds": 0.0, **changes}
    return msgspec.structs.replace(config, **fixed)


@asynccontextmanager
async def world_of(
    cache: Cache, config: Config, *, controls: bool = True, control: CacheControl | None = None
) -> AsyncIterator[World]:
    """A proxy that serves and may control the cache; with `controls` False it must have found why not.

    `control` stands in for its own driver.
    """
    async with serving(config, control) as up:
        world = World(up, cache)
        try:
            for _ in range(NUM_POLLS):
                if _is_ready(up, controls):
                    break
                await asyncio.sleep(POLL_SECONDS)
            else:
                raise AssertionError(f"not ready: {up.runtime.problems}")
            yield world
        finally:
            await world.close()


def _is_ready(up: Serving, controls: bool) -> bool:
    runtime = up.runtime
    tested = runtime.self_test.ok or (not controls and bool(runtime.self_test.chunk_size))
    return tested and all(m.service is not None or m.engine_ids is not None for m in runtime.models.values())
