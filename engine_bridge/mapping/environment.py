"""The Jinja environment in which engines run chat templates, and what can be read off a template beforehand.

Same settings, filters and globals as transformers 5.19 `utils/chat_template_utils.py`, rebuilt here so that
what we render does not depend on which transformers is installed beside us.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine_bridge.mapping.normalise import ContentFormat

_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset(
    [
        "index",
        "index0",
        "first",
        "last",
        "previtem",
        "nextitem",
        "length",
        "revindex",
        "revindex0",
        "depth",
        "depth0",
    ]
)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when rendering it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime(*time.localtime()[:6]).strftime(form)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for attribute reads on what templates read most: dicts, loops,
    namespaces.

    For these types the sandbox answers the same; it only takes longer to find out that the read is harmless.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is Namespace:
            if attribute[:1] != "_":
                held = namespace_attributes(obj)
                if attribute in held:
                    return held[attribute]
                return self.undefined(obj=obj, name=attribute)
        elif issubclass(kind, LoopContext) and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def namespace_attributes(namespace: Namespace) -> dict[str, Any]:
    """The attributes of a Jinja namespace, live."""
    held: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return held


@functools.lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """Names a template reads without setting them."""
    return frozenset(meta.find_undeclared_variables(ChatEnvironment().parse(source)))


def supports_developer(source: str) -> bool:
    """vLLM's test for a template that knows the developer role."""
    return '"developer"' in source or "'developer'" in source


@functools.lru_cache(maxsize=64)
@functools.lru_cache(maxsize=64)
def wants_system_first(source: str) -> bool:
    """Whether a template refuses a system message behind another one, by the trial that the engine makes.

    It tries in a bare sandbox, where a template that needs more than Jinja's own names counts as refusing.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "t"} for role in roles]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    return False


def detect_content_format(source: str) -> ContentFormat:
    """vLLM's rule: a template that loops over a message's content wants it as a list of parts.

    See `_detect_content_format` in vLLM 0.32 `renderers/hf.py`, which this follows, its failures included.
    """
    try:
        return "openai" if any(_content_loops(ChatEnvironment().parse(source))) else "string"
    except _UnusualTarget:
        return "string"


class _UnusualTarget(Exception):
    """A loop or assignment target that is not a plain name: vLLM's detection gives up there."""


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnusualTarget
    return target.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads_plain(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads_plain(node.node, name) and node.attr == key


def _reads_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    yield name
    queue = [name]
    while queue:
        related = queue.pop(0)
        for assign in root.find_all(nodes.Assign):
            if _reads(assign.node, related):
                alias = _name_of(assign.target)
                yield alias
                if alias != related:
                    if len(queue) > 1000:
                        raise _UnusualTarget
                    queue.append(alias)


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    aliases = list(_aliases(root, "messages"))
    messages = [
        _name_of(loop.target)
        for loop in root.find_all(nodes.For)
        if any(_reads(loop.iter, alias) for alias in aliases)
    ]
    bound, in_macros = _macro_contents(root, messages)
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, message, "content") for message in messages) or (
            isinstance(loop.iter, nodes.Name)
            and (
                loop.iter.name in bound.get(id(loop), ())
                or (id(loop) not in in_macros and loop.iter.name == "content")
            )
        ):
            _name_of(loop.target)
            yield loop


def _macro_contents(root: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Per loop inside a macro, the macro's parameters that receive a message's content."""
    bound: dict[int, set[str]] = {}
    in_macros: set[int] = set()
    calls = [call for call in root.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in root.find_all(nodes.Macro):
        names = [arg.name for arg in macro.args]
        received: set[str] = set()
        for call in calls:
            if call.node.name != macro.name:  # type: ignore[attr-defined]
                continue
            for name, value in zip(names, call.args, strict=False):
                if any(_reads(value, message, "content") for message in messages):
                    received.add(name)
            for keyword in call.kwargs:
                if (
                    isinstance(keyword, nodes.Keyword)
                    and keyword.key in names
                    and any(_reads(keyword.value, message, "content") for message in messages)
                ):
                    received.add(keyword.key)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if received:
                bound[id(loop)] = received
    return bound, in_macros
