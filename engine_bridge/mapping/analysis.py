"""What a template's syntax tree says about its message loop.

A template is *resumable* when its text is: text before one loop over the messages, the loop's iterations,
text after it; and when what an iteration emits depends only on bounded look-ahead and on named values. Then
a render can start again at the first iteration whose inputs changed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from jinja2 import nodes

_LIST_FILTERS = frozenset(("list", "reverse", "selectattr", "rejectattr", "select", "reject"))
_LOOP_AHEAD = frozenset(("last", "nextitem"))
_LOOP_SAFE = frozenset(("index", "index0", "first", "previtem", "depth", "depth0", "cycle"))
_BUILT_IN = frozenset(("raise_exception", "namespace", "range", "dict", "loop"))
_STATEFUL = frozenset(("joiner", "cycler", "lipsum"))


class LoopPlan(msgspec.Struct):
    """The message loop of a resumable template.

    Iteration i may depend on messages up to i + `lookahead`, and on the values of `free` at loop entry.
    `marks_suffice`: everything an iteration emits comes from its own message or an earlier one, so the
    owners of its text are known without following strings. `writes_after`: the text after the loop may
    hold messages or tools too.
    """

    loop: nodes.For
    lookahead: int
    free: tuple[str, ...]
    marks_suffice: bool
    writes_after: bool


class NotResumable(Exception):
    """Why a template has to be rendered as a whole."""


def plan_loop(tree: nodes.Template) -> LoopPlan:
    """Find the loop that writes the messages. Raises `NotResumable`."""
    aliases = _list_aliases(tree)
    emitting = [loop for loop in _root_loops(tree.body, aliases) if _emits(loop.body)]
    if not emitting:
        raise NotResumable("no loop over the messages at the root")
    return _analyse(tree, emitting[-1], aliases)


def emits_text(loop: nodes.For) -> bool:
    """Whether a loop's body can write anything."""
    body = nodes.Template(loop.body)
    return any(True for _ in body.find_all((nodes.Output, nodes.CallBlock, nodes.FilterBlock)))


def _list_aliases(tree: nodes.Template) -> frozenset[str]:
    """Names bound to the message list or to a list made from it."""
    aliases = {"messages"}
    grown = True
    while grown:
        grown = False
        for assign in tree.find_all(nodes.Assign):
            if (
                isinstance(assign.target, nodes.Name)
                and assign.target.name not in aliases
                and _is_list(assign.node, aliases)
            ):
                aliases.add(assign.target.name)
                grown = True
    return frozenset(aliases)


def _is_list(node: nodes.Node | None, aliases: Iterable[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in aliases
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Slice) and _is_list(node.node, aliases)
        case nodes.Filter():
            return node.name in _LIST_FILTERS and _is_list(node.node, aliases)
        case nodes.Add() | nodes.Concat():
            return any(_is_list(child, aliases) for child in node.iter_child_nodes())
        case nodes.CondExpr():
            return _is_list(node.expr1, aliases) or _is_list(node.expr2, aliases)
        case _:
            return False


def _root_loops(body: list[nodes.Node], aliases: frozenset[str]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.If):
            yield from _root_loops(node.body, aliases)
            for branch in node.elif_:
                yield from _root_loops(branch.body, aliases)
            yield from _root_loops(node.else_, aliases)
        elif (
            isinstance(node, nodes.For)
            and node.test is None
            and not node.recursive
            and isinstance(node.target, nodes.Name)
            and _is_list(node.iter, aliases)
        ):
            yield node


def _outputs(body: Iterable[nodes.Node]) -> Iterator[nodes.Output]:
    for node in body:
        if isinstance(node, nodes.Output):
            yield node
        yield from node.find_all(nodes.Output)


def _emits(body: list[nodes.Node]) -> bool:
    return any(not all(_is_silent(part) for part in output.nodes) for output in _outputs(body))


def _is_silent(node: nodes.Node) -> bool:
    if isinstance(node, nodes.TemplateData):
        return not node.data.strip()
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "raise_exception"
    )


def _loop_attribute(node: nodes.Node) -> str | None:
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
        return node.attr
    return None


def _offset(node: nodes.Node) -> int | None:
    """k of an index expression `loop.index0 + k`."""
    attribute = _loop_attribute(node)
    if attribute in ("index0", "index"):
        return int(attribute == "index")
    if (
        isinstance(node, nodes.Add | nodes.Sub)
        and isinstance(node.right, nodes.Const)
        and isinstance(node.right.value, int)
    ):
        base = _offset(node.left)
        if base is not None:
            return base + (node.right.value if isinstance(node, nodes.Add) else -node.right.value)
    return None


def _is_last_test(node: nodes.Compare, aliases: frozenset[str]) -> nodes.Name | None:
    """The list's name in `loop.index0 == messages | length - 1`, in either order."""
    if len(node.ops) != 1 or node.ops[0].op not in ("eq", "ne"):
        return None
    left, right = node.expr, node.ops[0].expr
    if _loop_attribute(right) in ("index", "index0"):
        left, right = right, left
    if isinstance(right, nodes.Sub) and isinstance(right.right, nodes.Const) and right.right.value == 1:
        right = right.left
    if (
        _loop_attribute(left) in ("index", "index0")
        and isinstance(right, nodes.Filter)
        and right.name in ("length", "count")
        and isinstance(right.node, nodes.Name)
        and right.node.name in aliases
    ):
        return right.node
    return None


def _analyse(tree: nodes.Template, loop: nodes.For, aliases: frozenset[str]) -> LoopPlan:
    body = nodes.Template(loop.body)
    lookahead = 0
    bounded: set[int] = set()
    for item in body.find_all(nodes.Getitem):
        if isinstance(item.node, nodes.Name) and item.node.name in aliases:
            offset = _offset(item.arg)
            if offset is not None:
                bounded.add(id(item.node))
                lookahead = max(lookahead, offset)
            elif isinstance(item.arg, nodes.Const) and item.arg.value == 0:
                bounded.add(id(item.node))
    for compare in body.find_all(nodes.Compare):
        if (name := _is_last_test(compare, aliases)) is not None:
            bounded.add(id(name))
            lookahead = max(lookahead, 2)
    lookahead = max(lookahead, _loop_lookahead(body))
    free = _free_names(tree, loop, body, aliases, bounded)
    after = _writes_after(tree, loop, aliases | {"tools"})
    return LoopPlan(
        loop=loop,
        lookahead=lookahead,
        free=tuple(sorted(free)),
        marks_suffice=not after
        and not _writes_ahead(body)
        and free.isdisjoint(_derived_names(tree, {"tools"})),
        writes_after=after,
    )


def _loop_lookahead(body: nodes.Template) -> int:
    reads: list[tuple[nodes.Node, Any]] = [(read.node, read.attr) for read in body.find_all(nodes.Getattr)]
    reads += [(read.node, getattr(read.arg, "value", None)) for read in body.find_all(nodes.Getitem)]
    attributes = {
        attribute for node, attribute in reads if isinstance(node, nodes.Name) and node.name == "loop"
    }
    unknown = attributes - _LOOP_AHEAD - _LOOP_SAFE
    if unknown:
        raise NotResumable(f"the loop reads loop.{unknown.pop()}")
    return int(not attributes.isdisjoint(_LOOP_AHEAD))


def _free_names(
    tree: nodes.Template,
    loop: nodes.For,
    body: nodes.Template,
    aliases: frozenset[str],
    bounded: set[int],
) -> set[str]:
    assert isinstance(loop.target, nodes.Name)
    names: set[str] = set()
    for name in body.find_all(nodes.Name):
        if name.ctx != "load" or name.name in ("loop", loop.target.name) or id(name) in bounded:
            continue
        if name.name in aliases:
            raise NotResumable(f"the loop reads {name.name}")
        names.add(name.name)
    macros: list[nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for macro in macros:
        arguments = {arg.name for arg in macro.args} | {"caller", "varargs", "kwargs", "loop"}
        for name in macro.find_all(nodes.Name):
            if name.ctx == "load" and name.name not in arguments:
                if name.name in aliases:
                    raise NotResumable("a macro reads the messages")
                names.add(name.name)
    if any(name.name in _STATEFUL for name in tree.find_all(nodes.Name)) or any(
        call.name == "random" for call in tree.find_all(nodes.Filter)
    ):
        raise NotResumable("the template keeps state of its own")
    if "strftime_now" in names:
        raise NotResumable("the loop reads the clock")
    return names - _BUILT_IN


def _writes_ahead(body: nodes.Template) -> bool:
    """Whether an iteration may write a later message's text."""
    for writer in [*body.find_all(nodes.Output), *body.find_all(nodes.Assign)]:
        if any(_loop_attribute(read) == "nextitem" for read in writer.find_all(nodes.Getattr)):
            return True
        if any((_offset(read.arg) or 0) > 0 for read in writer.find_all(nodes.Getitem)):
            return True
    return False


def _writes_after(tree: nodes.Template, loop: nodes.For, origins: frozenset[str]) -> bool:
    """Whether what follows the loop may write a message's text, or the tools'."""
    derived = _derived_names(tree, origins)
    inside = {id(node) for node in [*_outputs([loop]), *loop.find_all(nodes.For), loop]}
    writers: list[nodes.Node] = [output for output in tree.find_all(nodes.Output) if id(output) not in inside]
    writers += [
        other.iter for other in tree.find_all(nodes.For) if id(other) not in inside and emits_text(other)
    ]
    order = {id(node): place for place, node in enumerate(tree.find_all(nodes.Node))}
    return any(
        order[id(writer)] > order[id(loop)] and not _names(writer).isdisjoint(derived) for writer in writers
    )


def _names(node: nodes.Node) -> set[str]:
    names = {name.name for name in node.find_all(nodes.Name)}
    return names | {node.name} if isinstance(node, nodes.Name) else names


def _derived_names(tree: nodes.Template, origins: Iterable[str]) -> set[str]:
    """Some names and every name that was set from one of them."""
    derived = set(origins)
    assigned: list[tuple[nodes.Node, nodes.Node]] = [
        (assign.target, assign.node) for assign in tree.find_all(nodes.Assign)
    ]
    assigned += [(block.target, nodes.Template(block.body)) for block in tree.find_all(nodes.AssignBlock)]
    grown = True
    while grown:
        grown = False
        for target, source in assigned:
            if (
                isinstance(target, nodes.Name | nodes.NSRef)
                and target.name not in derived
                and not _names(source).isdisjoint(derived)
            ):
                derived.add(target.name)
                grown = True
    return derived
