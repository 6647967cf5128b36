"""Whatever is done to the list, what was told of it leads to the same list."""

import copy
import json
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._utils import maybe_transform
from openai.types.chat import completion_create_params

from kvtether import Client, Context, MessageList

MESSAGES = st.builds(lambda n: {"role": "user", "content": f"m{n}"}, st.integers(0, 6))
LISTS = st.lists(MESSAGES, max_size=5)
AT = st.integers(-9, 9)
BOUND = st.one_of(st.none(), AT)
SLICES = st.builds(slice, BOUND, BOUND, st.sampled_from([None, 1, 2, 3, -1, -2]))


class Told(Context):
    """A context that keeps what it is told instead of sending it."""

    def __init__(self, messages: list[Any]) -> None:
        super().__init__("c", client=Client())
        self.told: list[dict[str, Any]] = []
        self.messages.extend(messages)
        self.headers()  # the first call shows them

    def _record(self, operation: dict[str, Any]) -> None:
        self.told.append(operation)


def replayed(messages: list[Any], told: list[dict[str, Any]], final: list[Any]) -> list[Any]:
    """The model: a list that only hears the operations; what came in is marked by None."""
    model = list(messages)
    for operation in told:
        match operation["op"]:
            case "append":
                assert operation["n"] > 0
                model += [None] * operation["n"]
            case "replace":
                start, stop = operation["span"]
                assert 0 <= start <= stop <= len(model)
                model[start:stop] = [None] * operation["n"]
            case "remove":
                start, stop = operation["span"]
                assert 0 <= start < stop <= len(model)
                del model[start:stop]
    assert len(model) == len(final)
    return [new if known is None else known for known, new in zip(model, final, strict=True)]


def set_slice(target: list[Any], at: slice, new: list[Any]) -> None:
    wanted = len(range(len(target))[at])
    if at.step in (None, 1):
        target[at] = new
    elif new:
        target[at] = [new[i % len(new)] for i in range(wanted)]


STEPS = st.one_of(
    st.tuples(st.just("append"), MESSAGES),
    st.tuples(st.just("extend"), LISTS),
    st.tuples(st.just("iadd"), LISTS),
    st.tuples(st.just("imul"), st.integers(-1, 2)),
    st.tuples(st.just("insert"), AT, MESSAGES),
    st.tuples(st.just("set"), AT, MESSAGES),
    st.tuples(st.just("set_slice"), SLICES, LISTS),
    st.tuples(st.just("del"), AT),
    st.tuples(st.just("del_slice"), SLICES),
    st.tuples(st.just("pop"), AT),
    st.tuples(st.just("remove"), MESSAGES),
    st.tuples(st.just("clear")),
    st.tuples(st.just("reverse")),
    st.tuples(st.just("sort"), st.booleans()),
    st.tuples(st.just("sync"), LISTS),
)


def do(target: list[Any], step: tuple[Any, ...]) -> Any:
    """One operation on a list of either kind; what it answers, or the kind of error."""
    name, *given_ = step
    try:
        match name:
            case "iadd":
                target += given_[0]
            case "imul":
                target *= given_[0]
            case "set":
                target[given_[0]] = given_[1]
            case "set_slice":
                set_slice(target, *given_)
            case "del":
                del target[given_[0]]
            case "del_slice":
                del target[given_[0]]
            case "sort":
                target.sort(key=lambda m: m["content"], reverse=given_[0])
            case "sync" if isinstance(target, MessageList):
                target.sync(given_[0])
            case "sync":
                target[:] = given_[0]
            case _:
                return getattr(target, name)(*given_)
    except (IndexError, ValueError) as error:
        return type(error)
    return None


@given(LISTS, st.lists(STEPS, max_size=12))
def test_operations_tell_what_a_list_does(start, steps):
    context, plain = Told(start), list(start)
    for step in steps:
        assert do(context.messages, step) == do(plain, step)
        assert context.messages == plain
    assert replayed(start, context.told, plain) == plain
    assert context.length == len(plain)


@given(LISTS, st.lists(STEPS, min_size=1, max_size=4))
def test_what_stays_what_it_was_is_told_of_nobody(start, steps):
    context = Told(start)
    for step in steps:
        before, told = list(context.messages), len(context.told)
        do(context.messages, step)
        if before == context.messages:
            assert context.told[told:] == [] or step[0] in ("insert", "del", "del_slice", "pop", "remove")


def test_each_operation_is_the_primitive_it_looks_like():
    messages = Told([*"abcdef"]).messages
    told = messages._context.told
    messages.append("g")
    messages[1:3] = ["x"]
    del messages[0]
    messages.insert(1, "y")
    del messages[::2]
    assert messages == ["y", "e", "g"]
    assert [(o["op"], o.get("span"), o.get("n")) for o in told] == [
        ("append", None, 1),
        ("replace", [1, 3], 1),
        ("remove", [0, 1], None),
        ("replace", [1, 1], 1),
        ("remove", [4, 5], None),
        ("remove", [2, 3], None),
        ("remove", [0, 1], None),
    ]


def test_a_rewritten_list_tells_only_what_differs():
    context = Told([*"sabcdef"])
    context.messages[:] = ["s", "summary", *context.messages[-2:]]
    assert [(o["op"], o["span"], o["n"]) for o in context.told] == [("replace", [1, 5], 1)]


def test_a_list_that_somebody_else_keeps():
    context = Told([{"id": n, "cost": 0} for n in range(6)])
    context.messages.sync([{"id": n, "cost": 1} for n in (0, 2, 3, 5, 6)], key=lambda m: m["id"])
    assert [(o["op"], o.get("span"), o.get("n")) for o in context.told] == [
        ("remove", [1, 2], None),
        ("remove", [3, 4], None),
        ("append", None, 1),
    ]
    assert context.messages[0] == {"id": 0, "cost": 1}


@pytest.mark.parametrize(
    "made",
    [
        list,
        copy.copy,
        copy.deepcopy,
        lambda m: m.copy(),
        lambda m: m[:],
        lambda m: [*m],
        lambda m: m.__add__([]),
        lambda m: m * 1,
        lambda m: json.loads(json.dumps(m)),
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
)
def test_a_copy_is_a_plain_list(made):
    context = Told([{"role": "user", "content": "a"}])
    copied = made(context.messages)
    assert type(copied) is list
    assert copied == context.messages
    copied.append("b")
    assert context.told == []


def test_clients_take_it_as_it_is():
    messages = Told([{"role": "user", "content": "a"}]).messages
    body = {"model": "m", "messages": messages}
    assert maybe_transform(body, completion_create_params.CompletionCreateParams) == {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
    }
    assert json.dumps(messages) == '[{"role": "user", "content": "a"}]'


def test_threads_leave_list_and_telling_in_step():
    context = Told([])

    def work() -> None:
        for n in range(100):
            context.messages.append({"n": n})
            context.messages[-1:] = [{"n": -n}]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert context.length == len(context.messages) == 400
    replayed([], context.told, context.messages)
