"""A chat template, compiled twice: to render resumably, and to tell whose text each character is.

Method: the syntax tree gets calls at the message loop (`render.py` answers them) and, in the traced form,
marks at the start of every loop body that can emit; the traced form is given strings that carry their owner
(`provenance.py`). The traced text must equal the other's, else the contents are looked up in the text.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2 import filters, nodes

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.analysis import LoopPlan, NotResumable, emits_text, plan_loop
from engine_bridge.mapping.environment import ChatEnvironment
from engine_bridge.mapping.normalise import Merged, Message, cut_at_tag
from engine_bridge.mapping.provenance import (
    TOOLS,
    Run,
    TaggedText,
    concat,
    first_owner,
    join,
    plain,
    runs_of,
    tag_message,
    tag_value,
    tagged_json,
    text_of,
)
from engine_bridge.mapping.render import Recorder, RenderState, ResumableLoop

ENTER, SET, EXIT = "_kvt_enter", "_kvt_set", "_kvt_exit"
LOOP, STEP, LEAVE = "_kvt_loop", "_kvt_step", "_kvt_leave"


class Rendering(msgspec.Struct):
    """A rendered prompt: the first `kept` characters of the previous one, then `tail`.

    `segments` are (start, owner) of the text from `kept` on, in characters of the whole; owner -1 is
    nobody's. `body_end` is where the last message's text ends, `tools_end` where the tool definitions' does
    (0: none). `state` lets the next render resume.
    """

    kept: int
    tail: str
    segments: list[tuple[int, int]]
    body_end: int
    tools_end: int
    state: RenderState | None


class RenderInput(msgspec.Struct):
    """All that a template is given. `owners[i]` says which client message conversation[i] is."""

    conversation: list[Message]
    owners: list[int | Merged] | None
    tools: list[Message] | None
    kwargs: dict[str, Any]
    open_ended: bool = False

    def owner(self, index: int) -> int | Merged:
        return index if self.owners is None else self.owners[index]


class ChatTemplate:
    """One template source, compiled on first use. `whole_reason` says why it cannot resume, if it cannot."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.whole_reason = ""
        self._environment = ChatEnvironment()
        try:
            self._plain, self._plan = self._compile(self._environment, traced=False)
        except jinja2.TemplateError as error:
            raise Unmappable(f"the chat template does not compile: {error}") from error

    @property
    def resumable(self) -> bool:
        return self._plan is not None

    def _compile(self, environment: ChatEnvironment, traced: bool) -> tuple[jinja2.Template, LoopPlan | None]:
        tree = environment.parse(self.source)
        plan: LoopPlan | None = None
        try:
            plan = plan_loop(tree)
        except NotResumable as error:
            self.whole_reason = str(error)
        main = plan.loop if plan is not None else None
        if traced:
            tree.body = _Marker().mark(tree.body, frozenset())
        if plan is not None and main is not None:
            names = [nodes.Name(name, "load") for name in plan.free]
            main.iter = nodes.Call(nodes.Name(LOOP, "load"), [main.iter, nodes.List(names)], [], None, None)
            main.body.insert(0, _call(STEP))
            siblings = _siblings(tree, main)
            siblings.insert(siblings.index(main) + 1, _call(LEAVE))
        tree.set_environment(environment)
        code = environment.compile(tree)
        template = jinja2.Template.from_code(environment, code, dict(environment.globals))
        template.root_render_func.__globals__["LoopContext"] = ResumableLoop
        return template, plan

    @functools.cached_property
    def _traced(self) -> jinja2.Template:
        environment = ChatEnvironment()
        environment.filters["join"] = _join_filter
        environment.filters["tojson"] = tagged_json(environment.filters["tojson"])
        environment.filters["string"] = text_of
        environment.filters["safe"] = _safe_filter
        environment.concat = concat  # type: ignore[method-assign]
        template, _ = self._compile(environment, traced=True)
        template.root_render_func.__globals__["str_join"] = _str_join
        return template

    def render_whole(self, given: RenderInput) -> Rendering:
        """Render from the start. Raises `RejectedByEngine` when the template refuses, `Unmappable` when the
        text cannot be attributed to messages."""
        recorder = self._run(self._plain, given, self._recorder(given, None))
        text = cut_at_tag("".join(recorder.parts)) if given.open_ended else "".join(recorder.parts)
        return self._attributed(given, recorder, text, None)

    def resume(
        self, given: RenderInput, state: RenderState, common: int, max_steps: int | None = None
    ) -> Rendering | None:
        """Render from where the previous render, whose first `common` messages are the same objects, can be
        left. None when it cannot, or when more than `max_steps` messages would be rendered again.
        """
        if self._plan is None:
            return None
        recorder = self._run(self._plain, given, self._recorder(given, state, common, max_steps))
        if recorder.resumed_at is None:
            return None
        tail = "".join(recorder.parts)
        if given.open_ended:
            tail = cut_at_tag(tail)
        return self._attributed(given, recorder, tail, state)

    def _recorder(
        self, given: RenderInput, state: RenderState | None, common: int = 0, max_steps: int | None = None
    ) -> Recorder:
        lookahead = self._plan.lookahead if self._plan is not None else 0
        return Recorder(given.conversation, state, common, lookahead, max_steps)

    def _run(
        self,
        template: jinja2.Template,
        given: RenderInput,
        recorder: Recorder,
        marks: dict[str, Callable[..., str]] | None = None,
    ) -> Recorder:
        variables = {
            **given.kwargs,
            "messages": given.conversation,
            "tools": given.tools,
            **(marks or {}),
            LOOP: recorder.loop,
            STEP: recorder.step,
            LEAVE: recorder.leave,
        }
        try:
            for chunk in template.root_render_func(template.new_context(variables)):
                recorder.write(chunk)
                if recorder.stopped:
                    break
        except Exception as error:
            raise RejectedByEngine(f"the chat template refuses the request: {error}") from error
        return recorder

    def _attributed(
        self, given: RenderInput, recorder: Recorder, tail: str, state: RenderState | None
    ) -> Rendering:
        start = recorder.kept
        if (
            state is not None
            and self._plan is not None
            and self._plan.marks_suffice
            and given.owners is None
            and all(item >= 0 for _, item in recorder.steps)
        ):
            return Rendering(
                kept=start,
                tail=tail,
                segments=[*recorder.steps, (recorder.loop_end, -1)],
                body_end=min(recorder.loop_end, start + len(tail)),
                tools_end=-1,
                state=recorder.next_state(),
            )
        segments, body_end, tools_end = self._trace(given, recorder, tail, state)
        return Rendering(
            kept=start,
            tail=tail,
            segments=segments,
            body_end=min(max(body_end, recorder.loop_end), start + len(tail)),
            tools_end=tools_end if state is None or tools_end > start else -1,
            state=recorder.next_state(),
        )

    def _trace(
        self, given: RenderInput, recorder: Recorder, tail: str, state: RenderState | None
    ) -> tuple[list[tuple[int, int]], int, int]:
        low = 0
        if recorder.resumed_at is not None and self._plan is not None and not self._plan.writes_after:
            first = max(0, recorder.resumed_at - 1)
            low = min((item for item in recorder.items[first:] if item >= 0), default=0)
        tagged = [
            message if index < low else tag_message(message, given.owner(index))
            for index, message in enumerate(given.conversation)
        ]
        indexes = {id(message): index for index, message in enumerate(tagged)}
        marks = _Marks(indexes, given)
        traced_given = RenderInput(
            conversation=tagged,
            owners=given.owners,
            tools=None if given.tools is None else [tag_value(tool, TOOLS) for tool in given.tools],
            kwargs=given.kwargs,
            open_ended=given.open_ended,
        )
        follow = Recorder(tagged, state, force_start=recorder.resumed_at)
        try:
            self._run(
                self._traced, traced_given, follow, {ENTER: marks.enter, SET: marks.set, EXIT: marks.exit}
            )
        except RejectedByEngine:
            return _by_contents(given, recorder.kept, tail)
        text = concat(follow.parts)
        if follow.kept != recorder.kept or plain(text)[: len(tail) if given.open_ended else None] != tail:
            return _by_contents(given, recorder.kept, tail)
        return _segments(runs_of(text), recorder.kept, len(tail))


def _call(name: str, *arguments: nodes.Expr) -> nodes.Output:
    return nodes.Output([nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)])


def _siblings(tree: nodes.Template, loop: nodes.For) -> list[nodes.Node]:
    bodies = [tree.body]
    for branch in tree.find_all(nodes.If):
        bodies += [branch.body, branch.else_]
    return next(body for body in bodies if any(node is loop for node in body))


class _Marker:
    """Puts marks into a tree: at the start of loop bodies that emit, after such loops, after `{% set m =
    messages[i] %}`.
    """

    def __init__(self) -> None:
        self._loops = 0

    def mark(self, body: list[nodes.Node], counters: frozenset[str]) -> list[nodes.Node]:
        out: list[nodes.Node] = []
        for node in body:
            self._descend(node, counters)
            if isinstance(node, nodes.For) and isinstance(node.target, nodes.Name) and emits_text(node):
                self._loops += 1
                number = nodes.Const(self._loops)
                node.body.insert(0, _call(ENTER, number, nodes.Name(node.target.name, "load")))
                out += [node, _call(EXIT, number)]
                continue
            out.append(node)
            if (
                isinstance(node, nodes.Assign)
                and isinstance(node.target, nodes.Name)
                and isinstance(node.node, nodes.Getitem)
                and isinstance(node.node.arg, nodes.Name)
                and node.node.arg.name in counters
            ):
                out.append(_call(SET, nodes.Name(node.target.name, "load")))
        return out

    def _descend(self, node: nodes.Node, counters: frozenset[str]) -> None:
        for field in ("body", "else_", "elif_"):
            inner = getattr(node, field, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], nodes.Node):
                if isinstance(node, nodes.For) and field == "body" and isinstance(node.target, nodes.Name):
                    setattr(node, field, self.mark(inner, counters | {node.target.name}))
                else:
                    setattr(node, field, self.mark(inner, counters))


class _Marks:
    """Answers the marks' calls during one render."""

    def __init__(self, indexes: dict[int, int], given: RenderInput) -> None:
        self._indexes = indexes
        self._given = given
        self._over_messages: set[int] = set()

    def _owner(self, value: Any) -> int | None:
        index = self._indexes.get(id(value))
        return None if index is None else first_owner(self._given.owner(index))

    def enter(self, loop: int, value: Any) -> str:
        owner = self._owner(value)
        if owner is None and loop not in self._over_messages:
            return ""
        self._over_messages.add(loop)
        return TaggedText("", [(0, ("enter", loop, -1 if owner is None else owner))])

    def set(self, value: Any) -> str:
        owner = self._owner(value)
        return "" if owner is None else TaggedText("", [(0, ("set", 0, owner))])

    def exit(self, loop: int) -> str:
        return TaggedText("", [(0, ("exit", loop, -1))])


def _segments(runs: Sequence[Run], start: int, length: int) -> tuple[list[tuple[int, int]], int, int]:
    """Owners of `length` characters from the runs: (start, owner) pairs, end of owned text, end of tools."""
    out: list[tuple[int, int]] = []
    stack: list[tuple[int, int]] = []
    current = -1
    at, body_end, tools_end = start, 0, 0
    limit = start + length
    for size, tag in runs:
        if isinstance(tag, tuple):
            current = _move(stack, tag)
            continue
        if not size or at >= limit:
            continue
        owner = max(current, tag) if tag >= 0 else current
        if not out or out[-1][1] != owner:
            out.append((at, owner))
        at += size
        if owner >= 0:
            body_end = at
        if tag == TOOLS:
            tools_end = at
    return out, min(body_end, limit), min(tools_end, limit)


def _move(stack: list[tuple[int, int]], mark: tuple[str, int, int]) -> int:
    """Apply a mark to the stack of loops; answers the message whose turn it is, -1 for none."""
    kind, loop, owner = mark
    if kind == "set":
        if stack and stack[-1][0] == 0:
            stack.pop()
        stack.append((0, owner))
    else:
        for depth, (number, _) in enumerate(stack):
            if number == loop:
                del stack[depth:]
                break
        if kind == "enter":
            stack.append((loop, owner))
        elif len(stack) == 1 and stack[0][0] == 0:
            stack.pop()
    return stack[-1][1] if stack else -1


def _by_contents(given: RenderInput, start: int, tail: str) -> tuple[list[tuple[int, int]], int, int]:
    """Second rung: look each content up in the text, in order; scaffold goes to the message before it.

    Only for a whole render of unmerged messages. Raises `Unmappable` when a content is not found verbatim.
    """
    if start or given.owners is not None:
        raise Unmappable("the template's text cannot be attributed to messages")
    segments: list[tuple[int, int]] = [(0, -1)]
    at = 0
    for index, message in enumerate(given.conversation):
        content = message.get("content")
        if not isinstance(content, str) or message.get("tool_calls"):
            raise Unmappable("the template's text cannot be attributed to messages")
        found = tail.find(content.strip(), at)
        if found < 0:
            raise Unmappable("the template rewrites a message's content")
        segments.append((found, index))
        at = found + len(content.strip())
    return segments, at, 0


def _join_filter(value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return join(value, text_of(d), attribute)


def _safe_filter(value: Any) -> Any:
    return value if type(value) is TaggedText else filters.do_mark_safe(value)


def _str_join(values: Sequence[Any]) -> str:
    return concat([text_of(value) for value in values])


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> ChatTemplate:
    """The compiled template of a source, one per process."""
    return ChatTemplate(source)
