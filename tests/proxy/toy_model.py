"""A model directory and an engine that reads it, as test tools: one token a byte, and a cache that stores
what the engine computes."""

import asyncio
import json
import secrets
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_bridge.cache_events import BlocksStored, CacheEvent, EventBatch, short_hash
from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import KV_TRANSFER_PARAMS, MAX_OFFLOAD_TOKENS, Tier
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import DONE, Exchange, sse

NAME = "toy"
CHUNK = 16
BLOCK = 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>"]


def toy_tokenizer() -> Tokenizer:
    """One token a byte, two markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in MARKERS])
    return tokenizer


def write_model(directory: Path, template: str = TEMPLATE) -> Path:
    """A model directory as an engine and we load it."""
    directory.mkdir(parents=True, exist_ok=True)
    toy_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@dataclass
class ToyEngine:
    """Answers chat calls with `answer`, and keeps what it computed in `cache` by its own arithmetic.

    A stream that `holds` stops behind its first piece, until the client hangs up. `before` is awaited before
    a completion is computed.
    `responses` are what it remembers of them: without instructions, and of its answers the texts.
    `report` is told every new block of the engine's own memory, as its event stream would.
    """

    cache: FakeCache
    report: Callable[[EventBatch], None] = lambda batch: None
    answer: Callable[[dict[str, Any]], str] = lambda body: "ok"
    holds: Callable[[dict[str, Any]], bool] = lambda body: False
    before: Callable[[], Awaitable[None]] | None = None
    bodies: list[bytes] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    compacts: bool = True

    def __post_init__(self) -> None:
        self._tokenizer = toy_tokenizer()
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)

    def tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        """The prompt of a list."""
        text = self._template.render(messages=messages, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The prompt of a body: of a chat, a completion of one prompt, or a Messages or Responses call of
        plain texts."""
        given = body.get("prompt", body.get("text", body.get("input_ids")))
        if isinstance(given, str):
            ids: list[int] = self._tokenizer.encode(given, add_special_tokens=False).ids
            return ids
        if given is not None:
            return list(given)
        if "input" in body:
            instructions = [{"role": "system", "content": body.get("instructions")}]
            return self.tokens([*(instructions if body.get("instructions") else []), *self.listed(body)])
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        return self.tokens([*system, *({**m, "content": _text_of(m["content"])} for m in body["messages"])])

    def listed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of a Responses call, behind those of the response that it names."""
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        own = [
            {"role": "tool", "content": item["output"]}
            if "output" in item
            else {**item, "content": _text_of(item["content"])}
            for item in items
        ]
        return [*self.responses.get(body.get("previous_response_id") or "", []), *own]

    def keys(self, messages: list[dict[str, Any]]) -> list[bytes]:
        """The chain of chunk keys of a list's prompt."""
        return split_keys(chunk_keys(array("I", self.tokens(messages)), CHUNK))

    def compute(self, body: dict[str, Any], text: str) -> tuple[int, int]:
        """Store a call's tokens; answers how many the prompt has and how many were there."""
        prompt = self.prompt(body)
        self.prompts.append(prompt)
        generated = self._tokenizer.encode(text, add_special_tokens=False).ids
        keys = split_keys(chunk_keys(array("I", prompt), CHUNK))
        hit = next((n for n, key in enumerate(keys) if key not in self.cache.chunks), len(keys)) * CHUNK
        self.hits.append(hit)
        limit = body.get(KV_TRANSFER_PARAMS, {}).get(MAX_OFFLOAD_TOKENS)
        computed = [*prompt, *generated[:-1]]
        self.cache.store(chunk_keys(array("I", computed if limit is None else computed[:limit]), CHUNK))
        self._tell_blocks(
            computed, hit, body.get("session_id") or (body.get("vllm_xargs") or {}).get("session_id")
        )
        return len(prompt), hit

    def _tell_blocks(self, tokens: list[int], num_loaded: int, session_id: str | None) -> None:
        """One event for the blocks that were loaded, and one for those that were computed."""
        names = [short_hash(key) for key in split_keys(chunk_keys(array("I", tokens), BLOCK))]
        events: list[CacheEvent] = []
        for part in (range(num_loaded // BLOCK), range(num_loaded // BLOCK, len(names))):
            fresh = [n for n in part if names[n] not in self.blocks]
            if fresh:
                first, end = fresh[0], fresh[-1] + 1
                self.blocks.update(names[first:end])
                events.append(
                    BlocksStored(
                        tier=Tier.GPU,
                        hashes=tuple(names[first:end]),
                        parent=names[first - 1] if first else None,
                        token_ids=tuple(tokens[first * BLOCK : end * BLOCK]),
                        block_size=BLOCK,
                        session_id=session_id,
                    )
                )
        if events:
            self.report(EventBatch(incarnation=1, sequence=1, at_ns=1, events=tuple(events)))

    async def script(self, exchange: Exchange) -> None:
        """For a `ScriptedUpstream`."""
        body = await exchange.read_body()
        path = exchange.target.split(b"?")[0]
        if path == b"/v1/models":
            await exchange.respond_json({"object": "list", "data": [{"id": NAME, "object": "model"}]})
        elif path == b"/version":
            await exchange.respond_json({"version": "0.0.1"})
        elif path == b"/tokenize":
            await exchange.respond_json({"detail": "Not Found"}, 404)
        elif path == b"/v1/chat/completions":
            self.bodies.append(body)
            await self.chat(exchange, json.loads(body))
        elif path == b"/v1/completions" and b'"prompt"' in body:
            self.bodies.append(body)
            await self.completion(exchange, json.loads(body))
        elif path == b"/v1/messages" and b'"messages"' in body:
            self.bodies.append(body)
            await self.message(exchange, json.loads(body))
        elif path == b"/v1/responses" and b'"input"' in body:
            self.bodies.append(body)
            await self.response(exchange, json.loads(body))
        elif path == b"/v1/responses/compact" and b'"model"' in body:
            self.bodies.append(body)
            await self.compaction(exchange)
        elif path == b"/generate" and b'"sampling_params"' in body:
            self.bodies.append(body)
            await self.generate(exchange, json.loads(body))
        else:
            self.bodies.append(body)
            await exchange.respond_json({"path": path.decode()})

    async def chat(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """One chat call: computed first, then told."""
        text = self.answer(body)
        num_prompt, hit = self.compute(body, text)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(text.encode()),
            "total_tokens": num_prompt + len(text.encode()),
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        base = {"id": "chatcmpl-toy", "created": 1, "model": NAME}
        if body.get("stream"):
            await exchange.start_stream()
            base["object"] = "chat.completion.chunk"
            for piece in (text[:1], text[1:]):
                choice = {"index": 0, "delta": {"role": "assistant", "content": piece}}
                await exchange.chunk(sse({**base, "choices": [choice]}))
                if self.holds(body):
                    await asyncio.Event().wait()
            last = {"index": 0, "delta": {}, "finish_reason": "stop"}
            await exchange.chunk(sse({**base, "choices": [last]}))
            await exchange.chunk(sse({**base, "choices": [], "usage": usage}) + DONE)
            await exchange.end_stream()
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            await exchange.respond_json(
                {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
            )

    async def completion(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """One completion, of one prompt or of several, not streamed."""
        given = body["prompt"]
        several = isinstance(given, list) and not isinstance(given[0], int)
        prompts = given if several else [given]
        if self.before is not None:
            await self.before()
        text, counted, hit = self.answer(body), 0, 0
        for each in prompts:
            length, hit = self.compute({**body, "prompt": each}, text)
            counted += length
        choices = [{"index": n, "text": text, "finish_reason": "stop"} for n in range(len(prompts))]
        usage = {
            "prompt_tokens": counted,
            "completion_tokens": len(text) * len(prompts),
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        await exchange.respond_json(
            {"id": "cmpl-toy", "object": "text_completion", "model": NAME, "choices": choices, "usage": usage}
        )

    async def message(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """One Messages call, streamed or not."""
        text = self.answer(body)
        num_prompt, hit = self.compute(body, text)
        usage = {
            "input_tokens": num_prompt - hit,
            "output_tokens": len(text.encode()),
            "cache_read_input_tokens": hit,
        }
        head = {"id": "msg_toy", "type": "message", "role": "assistant", "model": NAME}
        block = {"type": "text", "text": text}
        if not body.get("stream"):
            await exchange.respond_json(
                {**head, "content": [block], "stop_reason": "end_turn", "usage": usage}
            )
            return
        delta = {"type": "text_delta", "text": text}
        await exchange.start_stream()
        for event in (
            {
                "type": "message_start",
                "message": {**head, "content": [], "usage": {**usage, "output_tokens": 0}},
            },
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
            {"type": "message_stop"},
        ):
            await exchange.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await exchange.end_stream()

    async def response(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """One Responses call, streamed or not. It keeps no response that it is told not to."""
        named = body.get("previous_response_id")
        if named is not None and named not in self.responses:
            error = {"message": f"Response with id '{named}' not found.", "code": 404}
            await exchange.respond_json({"error": error}, 404)
            return
        text = self.answer(body)
        num_prompt, hit = self.compute(body, text)
        response_id = f"resp_{len(self.bodies):08}{secrets.token_hex(4)}"
        if body.get("store") is not False:
            self.responses[response_id] = [*self.listed(body), {"role": "assistant", "content": text}]
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": hit},
            "output_tokens": len(text.encode()),
        }
        head = {"id": response_id, "object": "response", "model": NAME}
        whole = {**head, "status": "completed", "output": [item], "usage": usage}
        if not body.get("stream"):
            await exchange.respond_json(whole)
            return
        begun = {**head, "status": "in_progress", "output": [], "usage": None}
        await exchange.start_stream()
        for event in (
            {"type": "response.created", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ):
            await exchange.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            if event["type"] == "response.output_text.delta" and self.holds(body):
                await asyncio.Event().wait()
        await exchange.end_stream()

    async def compaction(self, exchange: Exchange) -> None:
        """What stands for a conversation from now on; an engine may have no such thing."""
        if not self.compacts:
            await exchange.respond_json({"detail": "Not Found"}, 404)
            return
        sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}
        output = [{"type": "message", "role": "user", "content": "what was asked"}, sealed]
        usage = {"input_tokens": 9, "output_tokens": 5}
        await exchange.respond_json(
            {"id": "resp_c", "object": "response.compaction", "output": output, "usage": usage}
        )

    async def generate(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """One request of SGLang's own API, of one prompt: a stream repeats the text from its beginning."""
        text = self.answer(body)
        num_prompt, hit = self.compute(body, text)
        meta = {"id": "rid", "prompt_tokens": num_prompt, "cached_tokens": hit, "finish_reason": None}
        ended = {**meta, "completion_tokens": len(text), "finish_reason": {"type": "stop", "matched": 2}}
        if not body.get("stream"):
            await exchange.respond_json({"text": text, "meta_info": ended})
            return
        await exchange.start_stream()
        await exchange.chunk(sse({"text": text[:1], "meta_info": {**meta, "completion_tokens": 1}}))
        await exchange.chunk(sse({"text": text, "meta_info": ended}) + DONE)
        await exchange.end_stream()


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)
