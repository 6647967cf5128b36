"""Messages to tokens to chunk keys, for one model: one code path, whole or incremental.

Three steps, so that a service can run each where it belongs: `prepare` (compare and normalise), a rendering
(`resume` here, or `compiled(source).render_whole` anywhere), `finish` (tokens, ranges, keys).
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array

import msgspec
import numpy as np

from engine_bridge.chunk_keys import CHUNK_TOKENS, extend_keys
from engine_bridge.errors import Unmappable
from engine_bridge.mapping.anthropic import EFFORTS, DisabledEffort, MessagesPrompt
from engine_bridge.mapping.history import History
from engine_bridge.mapping.model_profile import ModelProfile, TemplateFacts
from engine_bridge.mapping.normalise import (
    Merged,
    Message,
    merge_developer,
    normalise_tools,
    open_final_message,
    template_kwargs,
)
from engine_bridge.mapping.plain import PlainPrompt, mapped_plain
from engine_bridge.mapping.prompts import ChatPrompt, ConvertedPrompt
from engine_bridge.mapping.ranges import MappedPrompt, Segments
from engine_bridge.mapping.render import RenderState
from engine_bridge.mapping.responses import ResponsesPrompt
from engine_bridge.mapping.template import Rendering, RenderInput, compiled
from engine_bridge.mapping.tokens import TokenisedText, common_prefix, same_ids


class MappingState:
    """What the last prompt of a context leaves for its next one. Bounded by that prompt's size; one owner
    at a time.
    """

    def __init__(self) -> None:
        self.history = History()
        self.conversation: list[Message] = []
        self.tokens = TokenisedText()
        self.segments = Segments()
        self.keys = bytearray()
        self.source = ""
        self.render: RenderState | None = None
        self.tools_json = b""
        self.tools: list[Message] | None = None
        self.char_ends: np.ndarray = np.zeros(1, np.int64)
        self.token_ends: list[int] = [0]
        self.tools_char_end = 0
        self.tools_end = 0

    def clone(self) -> MappingState:
        """Independent state that shares what is never modified: texts and messages."""
        twin = MappingState()
        twin.__dict__.update(self.__dict__)
        twin.history = self.history.copy()
        twin.tokens = self.tokens.copy()
        twin.segments = self.segments.copy()
        twin.keys = self.keys[:]
        return twin

    def restart(self, ids: array[int]) -> None:
        """Be what a prompt of these ids leaves that was not rendered; the keys stay for it to extend."""
        keys = self.keys
        self.__dict__.update(MappingState().__dict__)
        self.keys, self.tokens.ids = keys, ids

    @property
    def size_bytes(self) -> int:
        """Rough size: rendered text, ids and keys, the messages' texts and their objects."""
        count = len(self.conversation)
        return (
            self.tokens.text.size_bytes
            + len(self.tokens.text)
            + 4 * len(self.tokens.ids)
            + len(self.keys)
            + 1000 * count
        )


class Prepared(msgspec.Struct):
    """A request on its way: what the template gets, and how much of it is the previous render's.

    `common` counts messages of the template's conversation, `common_messages` those of the client.
    """

    facts: TemplateFacts
    given: RenderInput
    common: int
    common_messages: int
    num_messages: int


class ChatMapper:
    """Maps chat prompts of one model. Holds no state of its own; safe to share between threads."""

    def __init__(self, profile: ModelProfile, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.profile = profile
        self.chunk_tokens = chunk_tokens

    def map(self, prompt: ChatPrompt, state: MappingState | None = None) -> MappedPrompt:
        """Tokens, ranges and keys of a prompt; `state` is brought up to date in place.

        Raises `Unmappable`; the state must then be dropped.
        """
        state = MappingState() if state is None else state
        prepared = self.prepare(prompt, state)
        rendering = self.resume(prepared, state)
        if rendering is None:
            rendering = compiled(prepared.facts.source).render_whole(prepared.given)
        return self.finish(prepared, rendering, state)

    def map_converted(
        self, prompt: MessagesPrompt | ResponsesPrompt, state: MappingState | None = None
    ) -> MappedPrompt:
        """`map` of a Messages or Responses request, by its own messages."""
        converted = self.converted(prompt)
        return converted.by_client_message(self.map(converted.prompt, state))

    def converted(self, prompt: MessagesPrompt | ResponsesPrompt) -> ConvertedPrompt:
        """A request as the chat request that the engine makes of it. Raises `Unmappable`."""
        if isinstance(prompt, ResponsesPrompt):
            return prompt.converted()
        effort = self._disabled_effort if prompt.thinking_off else "none"
        return prompt.converted(self.profile.wants_system_first(), effort)

    @functools.cached_property
    def _disabled_effort(self) -> DisabledEffort:
        """By the engine's trial: whether the template knows how to do without thinking at all."""
        without = self._trial("none")
        return "low" if without is None or without in map(self._trial, EFFORTS) else "none"

    def _trial(self, effort: str) -> str | None:
        prompt = ChatPrompt(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
        try:
            prepared = self.prepare(prompt, MappingState())
            return compiled(prepared.facts.source).render_whole(prepared.given).tail
        except Unmappable:
            return None

    def map_plain(self, prompt: PlainPrompt, state: MappingState | None = None) -> MappedPrompt:
        """Tokens and keys of a prompt that no template makes: it is one message.

        Raises `Unmappable`. Nothing of the text is kept, so it is encoded as a whole each time.
        """
        given, tokenizer = prompt.given, self.profile.tokenizer
        state = MappingState() if state is None else state
        ids = tokenizer.encode(given, prompt.special) if isinstance(given, str) else array("I", given)
        kept = same_ids(state.tokens.ids, ids)
        state.restart(ids)
        return mapped_plain(ids, kept, state.keys, self.chunk_tokens)

    def prepare(self, prompt: ChatPrompt, state: MappingState) -> Prepared:
        """Normalise what is new of a prompt."""
        tools = self._tools(prompt, state)
        facts = self.profile.template_for(tools is not None)
        common = common_messages = state.history.update(prompt.messages, facts.content_format)
        conversation: list[Message] = state.history.normal[:]
        owners: list[int | Merged] | None = None
        if not facts.knows_developer and state.history.first_developer is not None:
            conversation, owners = merge_developer(conversation)
            conversation, common = _reuse(state.conversation, conversation)
        if prompt.continue_final_message:
            conversation[-1] = open_final_message(conversation[-1], facts.source)
            common = min(common, len(conversation) - 1)
        else:
            common = min(common, _same_objects(state.conversation, conversation, common))
        state.conversation = conversation
        kwargs = template_kwargs(
            request=prompt.chat_template_kwargs,
            defaults=self.profile.facts.default_kwargs,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            reasoning_effort=prompt.reasoning_effort,
            template_variables=facts.variables,
        )
        given = RenderInput(
            conversation=conversation,
            owners=owners,
            tools=tools,
            kwargs={**self.profile.special_tokens, **kwargs},
            open_ended=prompt.continue_final_message,
        )
        return Prepared(facts, given, common, common_messages, len(prompt.messages))

    def _tools(self, prompt: ChatPrompt, state: MappingState) -> list[Message] | None:
        if prompt.tools is None or (
            prompt.tool_choice == "none" and self.profile.facts.exclude_tools_when_tool_choice_none
        ):
            return None
        encoded = msgspec.json.encode(prompt.tools)
        if state.tools is None or encoded != state.tools_json:
            state.tools = normalise_tools(prompt.tools)
            state.tools_json = encoded
        return state.tools

    def resume(
        self, prepared: Prepared, state: MappingState, max_steps: int | None = None
    ) -> Rendering | None:
        """Render only what can have changed; None if that cannot be told, or is more than `max_steps`
        messages.
        """
        if state.render is None or state.source != prepared.facts.source:
            return None
        rendering = compiled(state.source).resume(prepared.given, state.render, prepared.common, max_steps)
        if rendering is None or (rendering.tools_end < 0 and state.tools_char_end > rendering.kept):
            return None
        if state.segments.latest_owner(rendering.kept) >= prepared.common_messages:
            return None
        return rendering

    def chars_to_encode(self, rendering: Rendering, state: MappingState) -> int:
        """Upper bound of the text that `finish` has to tokenise."""
        total = rendering.kept + len(rendering.tail)
        old = state.tokens
        if not rendering.kept and old.text:
            return total - old.safe_start(common_prefix(old.text.tail(0), rendering.tail))
        return total - old.safe_start(rendering.kept)

    def finish(self, prepared: Prepared, rendering: Rendering, state: MappingState) -> MappedPrompt:
        """Tokenise and hash what is new of a rendering; releases the interpreter while tokenising."""
        tokenizer = self.profile.tokenizer
        kept_tokens, kept_chars = state.tokens.update(tokenizer, rendering.kept, rendering.tail)
        state.segments.replace_tail(rendering.kept, rendering.segments)
        ends = state.segments.char_ends(prepared.num_messages, rendering.body_end)
        self._place(state, ends, kept_chars)
        moved = rendering.tools_end != state.tools_char_end or rendering.tools_end >= kept_chars
        if rendering.tools_end >= 0 and moved:
            state.tools_char_end = rendering.tools_end
            state.tools_end = state.tokens.token_positions(tokenizer, [rendering.tools_end])[0]
        extend_keys(state.keys, state.tokens.ids, kept_tokens, self.chunk_tokens)
        state.source, state.render = prepared.facts.source, rendering.state
        return MappedPrompt(
            token_ids=state.tokens.ids[:],
            num_tokens=len(state.tokens.ids),
            num_kept_tokens=kept_tokens,
            head_end=state.token_ends[0],
            message_ends=tuple(state.token_ends[1:]),
            tools_end=state.tools_end,
            chunk_keys=bytes(state.keys),
            chunk_tokens=self.chunk_tokens,
        )

    def _place(self, state: MappingState, ends: np.ndarray, kept_chars: int) -> None:
        """Token positions of the character ends; those inside the unchanged text are known already."""
        size = min(len(ends), len(state.char_ends))
        same = (ends[:size] == state.char_ends[:size]) & (ends[:size] < kept_chars)
        count = size if same.all() else int(np.argmin(same))
        fresh = state.tokens.token_positions(self.profile.tokenizer, ends[count:].tolist())
        state.token_ends = state.token_ends[:count] + fresh
        state.char_ends = ends


def _reuse(old: list[Message], new: list[Message]) -> tuple[list[Message], int]:
    """Take over the old object of an equal merged message, which is made anew each time; count the common
    lead.
    """
    if old and new and old[0].keys() == new[0].keys() and old[0] == new[0]:
        new = [old[0], *new[1:]]
    return new, min(len(old), len(new))


def _same_objects(old: list[Message], new: list[Message], limit: int) -> int:
    """How many of the first `limit` entries are the same objects."""
    size = min(len(old), len(new), limit)
    if all(map(operator.is_, old, itertools.islice(new, size))):
        return size
    return next(at for at in range(size) if old[at] is not new[at])
