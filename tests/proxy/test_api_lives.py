"""Lives of calls that are no chat completions: mapped, proven, freed, by whatever API they came."""

import asyncio
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.chunk_keys import chunk_keys
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import CallEnded, CallMapped, PinRefused, PinSet, UntrackedForwarded
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.ports import Presence
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, MappingKind
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import Whole, assistant, lifecycle, user, whole_proxy

LONG = "a prompt that fills some chunks of sixteen bytes, and then a little more of it"
SYSTEM = "you are a system prompt that is long enough for a chunk or two of its own"


async def post(it: Whole, path: str, headers: dict[str, str], **fields: Any) -> Any:
    answer = await it.data.post(path, content=json.dumps({"model": NAME, **fields}), headers=headers)
    assert answer.status_code == 200, answer.text
    await it.runtime.mailboxes.settled()
    return answer


async def until_proven(it: Whole, name: str, keys: list[bytes]) -> None:
    namespace, index = it.context(name).namespace, it.runtime.tracker.contexts.index
    await it.until(lambda: index.verified_chunks(namespace, b"".join(keys)) == len(keys))


def keys_of(it: Whole, body: dict[str, Any]) -> list[bytes]:
    return split_keys(chunk_keys(array("I", it.toy.prompt(body)), CHUNK))


async def until_freed(it: Whole, keys: list[bytes]) -> None:
    def freed() -> set[bytes]:
        records = it.runtime.tracker.contexts.directives.values()
        done = [r for r in records if r.result and r.result.outcome is DirectiveOutcome.APPLIED]
        return {key for r in done if isinstance(r.directive, Reclaim) for key in split_keys(r.directive.keys)}

    await it.until(lambda: freed() >= set(keys))
    assert not set(keys) & set(it.cache.chunks)


class WatchedCache(FakeCache):
    """Tells when it was asked for the third time what it holds."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__(chunk_size=chunk_size)
        self.asked_three_times = asyncio.Event()

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        found = await super().locate(namespace, keys)
        if len(self.located) >= 3:
            self.asked_three_times.set()
        return found


def message(text: str, **fields: Any) -> dict[str, Any]:
    return {"system": SYSTEM, "max_tokens": 9, "messages": [user(text)], **fields}


REQUESTS = {
    "/v1/completions of text": {"prompt": LONG},
    "/v1/completions of ids": {"prompt": list(range(5 * CHUNK + 3))},
    "/v1/messages": message(LONG),
    "/v1/messages streamed": message(LONG, stream=True),
    "/v1/responses": {"input": LONG, "instructions": SYSTEM},
    "/v1/responses streamed": {"input": [user(LONG)], "instructions": SYSTEM, "stream": True},
    "/generate of text": {"text": LONG, "sampling_params": {}},
    "/generate of ids": {"input_ids": list(range(5 * CHUNK + 3)), "sampling_params": {}, "stream": True},
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_a_call_is_mapped_proven_and_freed_when_its_context_ends(tmp_path: Path, case: str) -> None:
    body, path = REQUESTS[case], case.split()[0]
    async with whole_proxy(tmp_path) as it:
        answer = await post(it, path, lifecycle(ctx="a"), **body)
        assert answer.headers["x-kv-context"] == "a"
        keys = keys_of(it, body)
        (mapped,) = await it.events(CallMapped)
        assert (mapped.kind, mapped.keys) == (MappingKind.EXACT, b"".join(keys))
        (end,) = await it.events(CallEnded)
        assert (end.end, end.prompt_tokens, end.cached_tokens) == (
            CallEnd.COMPLETED,
            len(it.toy.prompts[0]),
            0,
        )
        await until_proven(it, "a", keys)
        assert not await it.events(UntrackedForwarded)
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        await until_freed(it, keys)


async def test_what_was_generated_behind_a_prompt_is_freed_too(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: "an answer that is long enough to fill chunks of its own, two or three"
        for path, name, body in (
            ("/v1/completions", "a", {"prompt": LONG}),
            ("/v1/messages", "b", message(LONG + "?")),
        ):
            before = set(it.cache.chunks)
            await post(it, path, lifecycle(ctx=name), **body)
            stored = set(it.cache.chunks) - before
            prompt = set(keys_of(it, body))
            assert len(stored - prompt) >= 2
            sent = json.loads(it.toy.bodies[-1])
            assert ("session_id" in sent) == (path == "/v1/completions")
            assert ("vllm_xargs" in sent) == (path == "/v1/messages")
            await it.ops({"op": "close", "seq": 1, "ctx": name})
            await until_freed(it, sorted(stored))


async def test_a_client_with_arguments_of_its_own_for_the_engine_is_not_labelled(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/messages", {}, **message(LONG, vllm_xargs={"a": 1}))
        assert json.loads(it.toy.bodies[-1])["vllm_xargs"] == {"a": 1}


async def test_an_agent_on_the_messages_api_is_found_by_its_answers(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: f"answer to {len(body['messages'])}"
        first = await post(it, "/v1/messages", {}, **message(LONG))
        grown = [user(LONG), {"role": "assistant", "content": first.json()["content"]}, user("go on")]
        second = await post(it, "/v1/messages", {}, **message("", messages=grown))
        assert second.headers["x-kv-context"] == first.headers["x-kv-context"]
        other = await post(it, "/v1/messages", {}, **message("something else"))
        assert other.headers["x-kv-context"] != first.headers["x-kv-context"]


async def test_an_agent_may_change_its_api_and_keep_its_context(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/messages", lifecycle(ctx="a"), **{**message(LONG), "system": None})
        keys = keys_of(it, {"messages": [user(LONG)]})
        await it.chat([user(LONG), assistant("ok"), user("and by chat")], lifecycle(ctx="a"))
        await post(it, "/v1/completions", lifecycle(ctx="a"), prompt=LONG)
        kinds = [(m.kind, m.num_tokens) for m in await it.events(CallMapped)]
        assert kinds == [(MappingKind.EXACT, len(prompt)) for prompt in it.toy.prompts]
        assert set(keys) <= set(it.cache.chunks)


async def test_a_cache_mark_with_a_ttl_is_a_pin_and_the_system_prompt_can_be_pinned(tmp_path: Path) -> None:
    marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/messages", lifecycle(ctx="a"), **message("", messages=[user(marked)]))  # type: ignore[arg-type]
        await it.until(lambda: bool(it.context("a").pins))
        (pin,) = await it.events(PinSet)
        assert pin.index == 0
        assert pin.until_ns - pin.at_ns == 3600 * 10**9
        await it.ops({"op": "pin", "seq": 1, "ctx": "a", "span": "system"})
        assert not await it.events(PinRefused)
        assert [p.index for p in await it.events(PinSet)] == [0, -1]
        pinning = {"x-kv-lifecycle": 'ctx="b", pin=("system")'}
        await post(it, "/v1/completions", pinning, prompt=LONG)
        (refused,) = await it.events(PinRefused)
        assert "no system" in refused.reason, "a plain prompt has no head"


async def test_every_prompt_of_a_request_is_a_call_of_its_own(tmp_path: Path) -> None:
    prompts = [f"{n}: {LONG}" for n in range(3)]
    cache = WatchedCache(chunk_size=CHUNK)
    async with whole_proxy(tmp_path, cache=cache) as it:
        it.toy.before = cache.asked_three_times.wait
        await post(it, "/v1/completions", lifecycle(ctx="a", call="c"), prompt=prompts)
        assert set(it.context("a").attempts) == {"c", "c.1", "c.2"}
        sent = json.loads(it.toy.bodies[-1])
        assert "session_id" not in sent, "one label would name the tokens of three prompts"
        ends = await it.events(CallEnded)
        assert [(e.end, e.prompt_tokens) for e in ends] == [(CallEnd.COMPLETED, -1)] * 3
        keys = [keys_of(it, {"prompt": prompt}) for prompt in prompts]
        assert [m.num_tokens for m in await it.events(CallMapped)] == [len(p) for p in it.toy.prompts]
        await until_proven(it, "a", [key for each in keys for key in each])
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        await until_freed(it, [key for each in keys for key in each])


async def test_prompts_without_a_context_have_one_each(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/completions", {}, prompt=[f"{n}: {LONG}" for n in range(3)])
        assert len(it.runtime.tracker.contexts.states) == 3


async def test_a_prompt_that_cannot_be_mapped_says_why(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/completions", lifecycle(ctx="a"), prompt=LONG, suffix="end")
        image = {"type": "image", "source": {"type": "url", "url": "http://h/x.png"}}
        text = {"type": "text", "text": "what is this?"}
        answer = await it.data.post(
            "/v1/messages",
            json={"model": NAME, **message("", messages=[user([text, {**image, "text": ""}])])},  # type: ignore[arg-type]
            headers=lifecycle(ctx="b"),
        )
        assert answer.status_code == 200
        await it.runtime.mailboxes.settled()
        reasons = [m.reason for m in await it.events(CallMapped)]
        assert "suffix" in reasons[0]
        assert "image_url" in reasons[1]


async def test_counting_tokens_is_no_inference(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        answer = await it.data.post("/v1/messages/count_tokens", json={"model": NAME, **message("x")})
        assert answer.json() == {"path": "/v1/messages/count_tokens"}
        await it.runtime.mailboxes.settled()
        assert not await it.recorded() or not await it.events(UntrackedForwarded)
        assert not it.runtime.tracker.contexts.states


async def test_a_request_that_names_a_response_goes_on_with_its_context(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await post(it, "/v1/responses", {}, input=LONG, instructions=SYSTEM)
        named = {"previous_response_id": first.json()["id"], "instructions": SYSTEM}
        second = await post(it, "/v1/responses", {}, input="go on", stream=True, **named)
        context = second.headers["x-kv-context"]
        assert context == first.headers["x-kv-context"]
        said = json.loads(second.text.rpartition("data: ")[2])["response"]["id"]
        third = await post(
            it, "/v1/responses", {}, input="and on", previous_response_id=said, instructions=SYSTEM
        )
        assert third.headers["x-kv-context"] == context
        mapped = await it.events(CallMapped)
        assert [(m.kind, m.num_tokens) for m in mapped] == [
            (MappingKind.EXACT, len(prompt)) for prompt in it.toy.prompts
        ]
        roles = [v.role for v in it.context(context).versions.values() if v.index >= 0]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        keys = sorted(it.cache.chunks)
        await until_proven(it, context, split_keys(mapped[-1].keys))
        await it.ops({"op": "close", "seq": 1, "ctx": context})
        await until_freed(it, keys)


async def test_two_requests_that_name_one_response_are_a_context_and_its_fork(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: f"answer to {body['input']}"
        first = await post(it, "/v1/responses", {}, input=LONG)
        named = first.json()["id"]
        names = [
            (await post(it, "/v1/responses", {}, input=text, previous_response_id=named)).headers[
                "x-kv-context"
            ]
            for text in ("one", "other")
        ]
        assert names[0] == first.headers["x-kv-context"] != names[1]
        fork = it.context(names[1])
        assert fork.parent_uid == it.context(names[0]).uid
        assert [m.kind for m in await it.events(CallMapped)] == [MappingKind.EXACT] * 3


async def test_the_whole_list_and_a_response_named_are_one_context(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.answer = lambda body: "an answer"
        first = await post(it, "/v1/responses", {}, input=[user(LONG)], store=False)
        grown = [user(LONG), *first.json()["output"], user("go on")]
        second = await post(it, "/v1/responses", {}, input=grown)
        assert second.headers["x-kv-context"] == first.headers["x-kv-context"]
        third = await post(it, "/v1/responses", {}, input="more", previous_response_id=second.json()["id"])
        assert third.headers["x-kv-context"] == first.headers["x-kv-context"]
        assert [m.num_tokens for m in await it.events(CallMapped)] == [len(p) for p in it.toy.prompts]


async def test_a_response_that_is_not_known_is_forwarded_and_says_why_it_is_not_mapped(
    tmp_path: Path,
) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.responses["resp_of_yesterday"] = [user("what was said")]
        first = await post(it, "/v1/responses", {}, input="hi", previous_response_id="resp_of_yesterday")
        second = await post(it, "/v1/responses", {}, input="go on", previous_response_id=first.json()["id"])
        assert first.headers["x-kv-mapping"] == second.headers["x-kv-mapping"] == "none"
        assert first.headers["x-kv-context"] == second.headers["x-kv-context"]
        reasons = [(m.kind, m.reason) for m in await it.events(CallMapped)]
        assert reasons == [(MappingKind.NONE, "what previous_response_id stands for is not known")] * 2
        other = await post(it, "/v1/responses", {}, input="hi")
        assert other.headers["x-kv-context"] != first.headers["x-kv-context"], "another list begins otherwise"


async def test_a_response_the_engine_does_not_keep_is_its_answer_and_not_ours(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await post(it, "/v1/responses", lifecycle(ctx="a"), input=LONG, store=False)
        body = {"model": NAME, "input": "go on", "previous_response_id": first.json()["id"]}
        answer = await it.data.post("/v1/responses", json=body, headers=lifecycle(ctx="a"))
        assert answer.status_code == 404
        await it.runtime.mailboxes.settled()
        ends = [end.end for end in await it.events(CallEnded)]
        assert ends == [CallEnd.COMPLETED, CallEnd.FAILED]
        assert await post(it, "/v1/responses", lifecycle(ctx="a"), input=LONG)


async def test_a_response_in_the_background_is_not_followed(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await post(it, "/v1/responses", {}, input=LONG, background=True)
        (told,) = await it.events(UntrackedForwarded)
        assert "background" in told.reason


async def test_a_call_that_names_no_model_means_the_only_one(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        for path, body in (
            ("/v1/chat/completions", {"messages": [user(LONG)]}),
            ("/generate", {"text": LONG, "sampling_params": {"max_new_tokens": 2}}),
        ):
            answer = await it.data.post(path, json=body)
            assert answer.status_code == 200
            await it.runtime.mailboxes.settled()
        mapped = [(m.kind, m.num_tokens) for m in await it.events(CallMapped)]
        assert mapped == [(MappingKind.EXACT, len(prompt)) for prompt in it.toy.prompts]
        sent = json.loads(it.toy.bodies[-1])
        assert sent.keys() == {"text", "sampling_params"}, "SGLang is told nothing"


async def test_a_response_that_broke_off_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        it.toy.holds = lambda body: True
        body = {"model": NAME, "input": LONG, "stream": True}
        async with it.data.stream("POST", "/v1/responses", json=body, headers=lifecycle(ctx="a")) as answer:
            lines = answer.aiter_lines()
            begun = ""
            async for line in lines:
                if line.startswith("data: ") and '"response.created"' in line:
                    begun = json.loads(line[6:])["response"]["id"]
                if '"response.output_text.delta"' in line:
                    break
        await it.until(lambda: not it.context("a").flights and bool(it.context("a").attempts))
        (end,) = await it.events(CallEnded)
        assert end.end is CallEnd.ABORTED
        assert not len(it.runtime.tracking.calls.chains)
        assert begun
        again = await post(it, "/v1/responses", lifecycle(ctx="a"), input=LONG)
        assert again.json()["status"] == "completed"
