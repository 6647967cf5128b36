"""Answers of SGLang's own API, as its documentation shows them."""

import json
from typing import Any

import pytest

from proxy.answer_facts import Usage
from proxy.answer_tap import AnswerTap

META = {
    "id": "7e2f",
    "finish_reason": {"type": "length", "length": 3},
    "prompt_tokens": 9,
    "weight_version": "default",
    "completion_tokens": 3,
    "cached_tokens": 4,
    "e2e_latency": 0.1,
}


def read(*documents: Any, stream: bool = True) -> AnswerTap:
    tap = AnswerTap(200, "text/event-stream" if stream else "application/json")
    for document in documents:
        encoded = json.dumps(document)
        tap.feed(f"data: {encoded}\n\n".encode() if stream else encoded.encode())
    return tap


def test_an_answer_tells_text_and_tokens() -> None:
    tap = read({"text": " Paris.", "output_ids": [1, 2, 3], "meta_info": META}, stream=False)
    tap.close()
    facts = tap.facts()
    assert (facts.response_id, facts.complete) == ("7e2f", True)
    assert facts.usage == Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)
    [choice] = facts.choices
    assert (choice.content, choice.finish_reason) == (" Paris.", "length")


@pytest.mark.parametrize("texts", [["a", "ab", "abc"], ["a", "b", "c"]])
def test_a_stream_repeats_its_text_or_goes_on_with_it(texts: list[str]) -> None:
    tap = read(*({"text": t, "meta_info": {**META, "finish_reason": None}} for t in texts[:2]))
    assert (tap.first_token, tap.finished, tap.facts().complete) == (True, False, False)
    tap.feed(f"data: {json.dumps({'text': texts[2], 'meta_info': META})}\n\ndata: [DONE]\n\n".encode())
    facts = tap.facts()
    assert (tap.finished, facts.complete, facts.usage.prompt_tokens) == (True, True, 9)
    assert facts.choices[0].content == "abc"


def test_several_prompts_are_counted_together() -> None:
    outputs = [{"text": t, "meta_info": META} for t in "ab"]
    tap = read(outputs, stream=False)
    tap.close()
    facts = tap.facts()
    assert [(choice.index, choice.content) for choice in facts.choices] == [(0, "a"), (1, "b")]
    assert facts.usage == Usage(prompt_tokens=-1, completion_tokens=6, cached_tokens=None)
    streamed = read(*({**output, "index": at} for at, output in enumerate(outputs)))
    assert streamed.facts().choices == facts.choices


def test_an_error_is_read() -> None:
    tap = read({"error": {"message": "too long"}})
    assert tap.facts().error == "too long"


@pytest.mark.parametrize("odd", [[], [5], {"meta_info": 5}, {"text": 5, "meta_info": {"finish_reason": 5}}])
def test_nothing_an_engine_sends_is_too_odd(odd: Any) -> None:
    for stream in (True, False):
        tap = read(odd, stream=stream)
        tap.close()
        tap.facts()
