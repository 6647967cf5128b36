"""Plain agents of our own that do to their lists what harnesses do to theirs, each by seed.

They carry no identity but the truth header, which the proxy does not read: what it makes of them is inferred.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

import httpx

from harnesses.conversation import CHAT, MESSAGES, RESPONSES
from harnesses.model_server import TRUTH_HEADER
from harnesses.plain_wire import Echo, Message, read_answer, request_body
from harnesses.script import PROSE

TOOLS = ("shell", "read_file")
PRUNED = "[the result was long and is left out]"
LONGEST = 60
"""Calls that one run of an agent makes at most: a rule of the script that does not end is a fault."""


class Agent:
    """One context and its list."""

    def __init__(self, run: "PlainRun", ctx: str, system: str, tools: Sequence[str] = TOOLS) -> None:
        self.run = run
        self.ctx = ctx
        self.tools = tools
        self.system = system
        self.messages: list[Message] = []
        self.children = 0
        # One for each: agents of a run work at the same time, in no fixed order.
        self.chance = random.Random(f"{run.seed} {ctx}")
        self.first = ""
        """How its first request came about, if it is no new one."""

    async def ask(self, messages: Sequence[Message]) -> Message:
        """One request with a list."""
        truth, self.first = f"{self.ctx}{self.first}", ""
        return await self.run.send([Message("system", self.system), *messages], self.tools, truth)

    async def work(self, text: str, shown: "Callable[[Agent], list[Message]] | None" = None) -> str:
        """A user's text and all turns until the answer. `shown` is what of the list is sent."""
        self.messages.append(Message("user", text))
        for _ in range(LONGEST):
            answer = await self.ask(shown(self) if shown else self.messages)
            self.messages.append(answer)
            if not answer.uses:
                return answer.text
            results = await asyncio.gather(*(self.use(use.name, use.value) for use in answer.uses))
            for use, result in zip(answer.uses, results, strict=True):
                self.messages.append(Message("tool", result, (), use.call_id))
        raise RuntimeError(f"{self.ctx} does not come to an end")

    async def use(self, name: str, value: str) -> str:
        """What a tool answers."""
        if name == "task":
            return await self.run.subagent(self, value)
        if name == "shell":
            return value.partition("'")[2].rpartition("'")[0]
        return PROSE * self.chance.randint(1, 12)

    def one_off(self, kind: str) -> Awaitable[Message]:
        """A request about this list that no list goes on with: a title or a summary of it."""
        transcript = "\n".join(f"{each.role}: {each.text}" for each in self.messages)
        asked = f"Write a {kind} of this conversation.\n{transcript}"
        how = f"; relation=one-off; parent={self.ctx}"
        return self.run.send([Message("user", asked)], (), f"{self.ctx}.{kind}{how}")


class PlainRun:
    """What chance decides of a run, and its way to the model."""

    def __init__(self, http: httpx.AsyncClient, url: str, model: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self._http = http
        self._url = url
        self._model = model
        self.path = self.chance.choice((CHAT, CHAT, MESSAGES, RESPONSES))
        echoes: tuple[Echo, ...] = ("verbatim", "verbatim", "reserialised", "bare")
        self.echo: Echo = self.chance.choice(echoes)
        self.system = "You are an agent that looks around. " + PROSE * self.chance.randint(0, 8)
        self.prose = self.chance.randint(1, 6)

    def task(self, name: str, number: int, ctx: str, more: int | None = None) -> str:
        """A user's text with a task in it."""
        chance = random.Random(f"{self.seed} {ctx} {number}")
        more = chance.randint(0, 5) if more is None else more
        words = chance.choice(("Look around.", "What is in the notes?", "Check the figures once more."))
        mark = f"{name}#{self.seed}-{ctx.replace('.', '-')}-{number}"
        return f"[[task {mark} more={more} prose={self.prose}]] {words}"

    def agent(self, number: int = 0) -> Agent:
        return Agent(self, f"{self.seed}-main-{number}", self.system)

    async def send(self, messages: Sequence[Message], tools: Sequence[str], truth: str) -> Message:
        """One request and its answer."""
        body = request_body(self.path, self._model, messages, tools, self.echo)
        reply = await self._http.post(f"{self._url}{self.path}", json=body, headers={TRUTH_HEADER: truth})
        reply.raise_for_status()
        return read_answer(self.path, reply.json())

    async def subagent(self, parent: Agent, prompt: str) -> str:
        """Let another agent with another head do a task; answers what it says."""
        parent.children += 1
        child = Agent(self, f"{parent.ctx}.sub-{parent.children}", "You help another agent.", TOOLS[:1])
        child.first = f"; relation=subagent; parent={parent.ctx}"
        return await child.work(prompt)


async def append_only(run: PlainRun, agent: Agent) -> None:
    """Only ever appends."""
    for number in range(agent.chance.randint(1, 3)):
        await agent.work(run.task("tools", number, agent.ctx))


async def sliding_window(run: PlainRun, agent: Agent) -> None:
    """Sends the last messages only, on each call anew, as autogen's buffered context does."""
    width = agent.chance.randint(4, 10)

    def shown(of: Agent) -> list[Message]:
        kept = of.messages[-width:]
        while kept[0].role == "tool":
            kept = kept[1:]
        return kept

    for number in range(2):
        await agent.work(run.task("tools", number, agent.ctx, more=6), shown)


async def summarising(run: PlainRun, agent: Agent) -> None:
    """Gives all but the last exchange up for a summary after each run, as agno does."""
    for number in range(3):
        await agent.work(run.task("tools", number, agent.ctx, more=2))
        summary = await agent.one_off("summary")
        keep = agent.chance.choice((0, 1, 2))
        agent.messages = [Message("user", summary.text), *(agent.messages[-keep:] if keep else ())]
        if keep == 2 and agent.messages[1].role == "tool":
            del agent.messages[1]


async def pruning(run: PlainRun, agent: Agent) -> None:
    """Cuts old tool results out of the list, some at a time."""
    every, keep = agent.chance.randint(2, 4), agent.chance.randint(2, 4)

    def shown(of: Agent) -> list[Message]:
        results = [at for at, each in enumerate(of.messages) if each.role == "tool"]
        if len(results) % every == 0:
            for at in results[:-keep]:
                each = of.messages[at]
                of.messages[at] = Message("tool", PRUNED, (), each.result_of)
        return of.messages

    for number in range(2):
        await agent.work(run.task("tools", number, agent.ctx, more=5), shown)


async def retrying(run: PlainRun, agent: Agent) -> None:
    """Sends a request again now and then: after an answer that it throws away, or both at once."""
    agent.messages.append(Message("user", run.task("tools", 0, agent.ctx, more=4)))
    for _ in range(LONGEST):
        times = agent.chance.choice((1, 1, 2, 3))
        if agent.chance.random() < 0.3:
            answers = await asyncio.gather(*(agent.ask(agent.messages) for _ in range(times)))
        else:
            answers = [await agent.ask(agent.messages) for _ in range(times)]
        agent.messages.append(answers[-1])
        if not answers[-1].uses:
            return
        for use in answers[-1].uses:
            agent.messages.append(Message("tool", await agent.use(use.name, use.value), (), use.call_id))


async def delegating(run: PlainRun, agent: Agent) -> None:
    """Has several subagents work at the same time, some with subagents of their own."""
    agent.tools = ("shell", "read_file", "task")
    await agent.work(run.task(agent.chance.choice(("crowd", "full")), 0, agent.ctx))
    await agent.work(run.task("tools", 1, agent.ctx))


async def best_of(run: PlainRun, agent: Agent) -> None:
    """Lets several copies of the list go on in ways of their own and takes the best one."""
    await agent.work(run.task("tools", 0, agent.ctx))
    branches = []
    for number in range(agent.chance.randint(2, 4)):
        branch = Agent(run, f"{agent.ctx}.way-{number}", agent.system, agent.tools)
        branch.messages = list(agent.messages)
        branch.first = f"; relation=fork; parent={agent.ctx}"
        branches.append(branch.work(run.task("tools", 1, branch.ctx, more=1) + f" Try way {number}."))
    answers = await asyncio.gather(*branches)
    agent.messages.append(Message("user", f"The best of {len(answers)} ways said: {answers[-1]}"))
    await agent.work(run.task("tools", 2, agent.ctx, more=0))


async def rewinding(run: PlainRun, agent: Agent) -> None:
    """Takes a user's text back with all that followed and says another one in its place."""
    for number in range(3):
        before = len(agent.messages)
        await agent.work(run.task("tools", number, agent.ctx))
        if agent.chance.random() < 0.6:
            del agent.messages[before:]
            await agent.work(run.task("tools", number + 10, agent.ctx))


async def restless(run: PlainRun, agent: Agent) -> None:
    """Tells the time in its system prompt, so that each call's head is another."""
    system = agent.system

    def shown(of: Agent) -> list[Message]:
        of.system = f"It is {agent.chance.randint(0, 23)}:{agent.chance.randint(10, 59)} now. {system}"
        return of.messages

    for number in range(2):
        await agent.work(run.task("tools", number, agent.ctx), shown)


BEHAVIOURS: Mapping[str, Callable[[PlainRun, Agent], Coroutine[None, None, None]]] = {
    "append": append_only,
    "window": sliding_window,
    "summary": summarising,
    "prune": pruning,
    "retry": retrying,
    "delegate": delegating,
    "best-of": best_of,
    "rewind": rewinding,
    "clock": restless,
}


async def behave(name: str, seed: int, url: str, model: str) -> None:
    """One run of a behaviour against a server: one to three agents at the same time, with the same head.

    Chance decides the API, how answers are sent back, and lengths. Some ask for a title first.
    """
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        run = PlainRun(http, url, model, seed)

        agents = [run.agent(number) for number in range(run.chance.choice((1, 1, 2, 3)))]
        if run.chance.random() < 0.4:
            asked = Message("user", "Write a title for a conversation about: looking around")
            await run.send([asked], (), f"{seed}-title; relation=one-off")
        await asyncio.gather(*(BEHAVIOURS[name](run, agent) for agent in agents))
