"""Whatever clients do at once, the books equal a recount, the log tells the same, and nothing is left."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from lifecycle.core.ids import split_keys
from lifecycle.core.observations import PinsDropped
from proxy.tasks import owned_tasks
from tests.lifecycle.lives import books, replayed
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Message, Whole, assistant, lifecycle, system, user, whole_proxy

HEADS = ["you are the one agent of this story", "you are quite another agent in it"]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
NAMES = ["a", "b", "c", "d"]
CHAT = "/v1/chat/completions"
LONG = "a longer answer that fills some chunks of its own"


class Client:
    """One of several clients that share contexts, call ids and sources, and do not wait for each other."""

    def __init__(self, it: Whole, seed: int) -> None:
        self.it = it
        self.random = random.Random(seed)
        self.lists: dict[str, list[Message]] = {}
        self.sent: list[dict[str, Any]] = []
        self.seq = 0

    def say(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(2, 8)))

    def list(self, name: str) -> list[Message]:
        """The context's list, changed as agents do: grown mostly, edited at times."""
        messages = self.lists.setdefault(name, [system(HEADS[NAMES.index(name) % 2])])
        choice = self.random.random()
        if choice < 0.15 and len(messages) > 2:
            at = self.random.randrange(1, len(messages))
            messages[at:] = [user(self.say())]
        elif choice < 0.25 and len(messages) > 2:
            messages[1:-1] = [user("summary " + self.say())]
        else:
            messages += [assistant("ok"), user(self.say())] if len(messages) > 1 else [user(self.say())]
        return list(messages)

    async def act(self) -> None:
        """Something that a client does."""
        name = self.random.choice(NAMES)
        await self.random.choice([self.call, self.call, self.retry, self.abort, self.operate, self.branch])(
            name
        )

    async def call(self, name: str, **fields: object) -> None:
        fields = {"ctx": name, "call": f"{self.random.randrange(10)}", **fields}
        body = {"model": NAME, "messages": self.list(name), "stream": self.random.random() < 0.5}
        answer = await self.it.data.post(CHAT, json=body, headers=lifecycle(**fields))
        assert answer.status_code == 200

    async def retry(self, name: str) -> None:
        """The same call twice, one over the other."""
        body = {"model": NAME, "messages": self.list(name)}
        headers = lifecycle(ctx=name, call=f"{self.random.randrange(10)}")
        both = [self.it.data.post(CHAT, json=body, headers=headers) for _ in range(2)]
        assert {a.status_code for a in await asyncio.gather(*both)} == {200}

    async def abort(self, name: str) -> None:
        body = {"model": NAME, "messages": self.list(name), "stream": True, "user": "holds"}
        headers = lifecycle(ctx=name, call=f"{self.random.randrange(10)}")
        async with (
            httpx.AsyncClient(base_url=self.it.up.data_url, timeout=20) as client,
            client.stream("POST", CHAT, json=body, headers=headers) as answer,
        ):
            async for _ in answer.aiter_raw():
                break

    async def branch(self, name: str) -> None:
        """A fork, a one-off or a fresh context."""
        kind = self.random.choice([{"fork_at": 2}, {"one_off": True}, {"fork_at": 1, "one_off": True}, {}])
        child = f"{name}-{self.random.randrange(5)}"
        body = {"model": NAME, "messages": [*self.lists.get(name, [system(HEADS[0])]), user(self.say())]}
        headers = lifecycle(ctx=child, parent=name, call=f"{self.random.randrange(3)}", **kind)
        assert (await self.it.data.post(CHAT, json=body, headers=headers)).status_code == 200

    async def operate(self, name: str) -> None:
        """New operations, old ones again, and in any order."""
        self.seq += 1
        start = self.random.randrange(3)
        span = [start, start + self.random.randint(1, 2)]
        kind = self.random.choice(
            [
                {"op": "replace", "span": span, "n": 1},
                {"op": "remove", "span": span},
                {"op": "append", "n": 1},
                {"op": "pin", "span": span, "ttl": 60},
                {"op": "unpin", "span": span},
                {"op": "waiting", "kind": "tool"},
                {"op": "outcome", "span": span, "result": "failed"},
            ]
        )
        if self.random.random() < 0.1:
            kind = {"op": "close"}
        self.sent.append({"seq": self.seq, "ctx": name, **kind})
        batch = [*self.random.choices(self.sent, k=2), self.sent[-1]]
        self.random.shuffle(batch)
        answer = await self.it.data.post("/kv/v1/ops", json={"source": f"{id(self)}", "ops": batch})
        assert answer.status_code == 200


def recount(it: Whole) -> None:
    """References are what the contexts hold, no more and no less."""
    contexts = it.runtime.tracker.contexts
    held: dict[Any, Counter[bytes]] = {}
    for state in contexts.states.values():
        counter = held.setdefault(state.namespace, Counter())
        for version in state.versions.values():
            counter.update(split_keys(version.keys))
    for namespace, counter in held.items():
        assert contexts.index.stats(namespace).live == len(counter)
        for key, references in counter.items():
            assert contexts.index.references(namespace, key) == references


async def settled(it: Whole) -> None:
    """Every queue is empty, and every directive has its outcome."""
    contexts = it.runtime.tracker.contexts
    await it.until(lambda: all(r.result is not None for r in contexts.directives.values()))
    await it.runtime.mailboxes.settled()


@pytest.mark.parametrize("seed", range(4))
async def test_the_books_equal_a_recount_whatever_happens_at_once(tmp_path: Path, seed: int) -> None:
    async with whole_proxy(tmp_path, plan_wait_seconds=0.005) as it:
        it.toy.holds = lambda body: body.get("user") == "holds"
        it.toy.answer = lambda body: "ok" if len(json.dumps(body)) % 3 else LONG
        clients = [Client(it, seed * 100 + n) for n in range(5)]

        async def live(client: Client) -> None:
            for _ in range(12):
                await client.act()

        async with owned_tasks() as tasks:
            await asyncio.gather(*(tasks.run(live(c)) for c in clients))
        contexts = it.runtime.tracker.contexts
        assert contexts.states
        # The last hang-ups may be on their way still.
        await it.until(lambda: not any(s.flights for s in contexts.states.values()))
        await settled(it)
        recount(it)
        assert books(contexts) == books(await replayed(it.runtime.event_log))

        for uid in list(contexts.states):
            await it.admin.post(f"/kv/v1/contexts/{uid}/close")
            now_ns = it.runtime.clock.now_ns()
            await it.runtime.tracker.observe(uid, PinsDropped(at_ns=now_ns, reason="the end"))
        await settled(it)
        for namespace in contexts.index.namespaces():
            assert contexts.index.stats(namespace).live == 0
        recount(it)
        assert books(contexts) == books(await replayed(it.runtime.event_log))
        assert it.cache.holds == {}
