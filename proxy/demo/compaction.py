"""One context is compacted, and what happens to its chunks is written down step by step."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx

from lifecycle.core.events import ListEdited, RecordedEvent
from proxy.app import Serving
from proxy.demo.results import Step
from proxy.demo.watch import Watch

CONTEXT = "demo:compacted"
NUM_TURNS = 10
NUM_LOOKS = 400
"""Looks at the books or the cache until they show what is waited for."""

LOOK_SECONDS = 0.05
_RULES = " ".join(f"Rule {number}: read before you write, and test what you wrote." for number in range(60))
_LOG = " ".join(f"{n:03d} GET /items/{n * 37 % 101} 200 {n * 13 % 90} ms;" for n in range(90))

Message = dict[str, Any]


class CompactedAgent:
    """An agent that reads logs turn by turn, has itself summarised by a one-off, and goes on with that."""

    def __init__(self, up: Serving, model: str, watch: Watch, num_looks: int = NUM_LOOKS) -> None:
        self._num_looks = num_looks
        self._up = up
        self._model = model
        self._watch = watch
        self._steps: list[Step] = []
        self._keys: list[bytes] = []

    async def steps(self) -> list[Step]:
        """Live through it. Raises `httpx.HTTPError` where a call fails."""
        tracker = self._up.runtime.tracker
        history: list[Message] = [
            {"role": "system", "content": _RULES},
            {"role": "user", "content": "What was slow last week?"},
        ]
        async with httpx.AsyncClient(base_url=self._up.data_url, timeout=60.0, trust_env=False) as http:
            for number in range(NUM_TURNS):
                said, _ = await self._call(http, history, {"ctx": CONTEXT, "waiting": "tool"})
                history += [said, {"role": "user", "content": f"Day {number}: {_LOG}"}]
            await self._call(http, history, {"ctx": CONTEXT, "waiting": "tool"})
            await self._take_stock()
            await self._write(
                f"{NUM_TURNS} turns.",
                "Every chunk of the list is held by its context and shown by the cache.",
            )
            ask = {"role": "user", "content": "Summarise all of this in one paragraph."}
            fork = {"ctx": f"{CONTEXT}:summary", "parent": CONTEXT, "fork_at": len(history), "one_off": True}
            summary, _ = await self._call(http, [*history, ask], fork)
            await self._write(
                "A one-off writes the summary.",
                "It reads the parent's chunks; its own never enter the store, for nobody will ask for them.",
            )
            edit = {"op": "replace", "ctx": CONTEXT, "seq": 1, "span": [1, len(history)], "n": 1}
            title = f"replace(1..{len(history)}, 1 summary)."
            tracker.listeners.append(partial(self._edited, title))
            answer = await http.post("/kv/v1/ops", json={"source": "demo", "ops": [edit]})
            tracker.listeners.pop()
            answer.raise_for_status()
            await self._until_gone()
            await self._write("Reclaimed.", "Two lookups in a row no longer show the dead.")
            short = [history[0], {"role": "user", "content": str(summary["content"])}]
            _, usage = await self._call(http, short, {"ctx": CONTEXT})
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            await self._write(
                "The next call.", f"{cached:,} of its {usage['prompt_tokens']:,} prompt tokens were there."
            )
        return self._steps

    async def _call(
        self, http: httpx.AsyncClient, messages: list[Message], fields: dict[str, Any]
    ) -> tuple[Message, dict[str, Any]]:
        body = {"model": self._model, "messages": messages, "max_tokens": 16, "kv_lifecycle": fields}
        response = await http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        answer = response.json()
        said = answer["choices"][0]["message"]
        return {"role": "assistant", "content": said["content"] or ""}, answer["usage"]

    async def _take_stock(self) -> None:
        """The list's chunks, once the cache has shown them all."""
        contexts = self._up.runtime.tracker.contexts
        for _ in range(self._num_looks):
            state = next((s for s in contexts.states.values() if s.key.context_id == CONTEXT), None)
            if state is not None:
                keys = b"".join(version.keys for version in state.versions.values())
                self._keys = [keys[at : at + 32] for at in range(0, len(keys), 32)]
                if self._keys and not contexts.index.unproven(state.namespace, keys):
                    return
            await asyncio.sleep(LOOK_SECONDS)

    def _edited(self, title: str, batch: Sequence[RecordedEvent]) -> None:
        """The moment at which the books know and nothing was sent yet: append comes first."""
        if any(isinstance(recorded.event, ListEdited) for recorded in batch):
            alive = sum(map(self._watch.is_held, self._keys))
            text = "Everything behind the first message is dead: keys are chained, no prompt can hit it."
            dead = len(self._keys) - alive
            self._steps.append(Step(title=title, text=text, alive=alive, dead=dead, gone=0))

    async def _until_gone(self) -> None:
        for _ in range(self._num_looks):
            _, dead, _ = await self._watch.fates(self._keys)
            if not dead:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _write(self, title: str, text: str) -> None:
        alive, dead, gone = await self._watch.fates(self._keys)
        self._steps.append(Step(title=title, text=text, alive=alive, dead=dead, gone=gone))
