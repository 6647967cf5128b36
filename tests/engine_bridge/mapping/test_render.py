"""A resumed render equals a whole one; what cannot be resumed says so."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.mapping.ranges import Segments
from engine_bridge.mapping.template import ChatTemplate, Rendering, RenderInput

TEMPLATES = {
    "plain": "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}",
    "look-ahead": "{% for m in messages %}{{ m.content }}{% if not loop.last %},{% endif %}{% endfor %}",
    "slice": "{{ messages[0].role }}{% for m in messages[1:] %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "namespace": (
        "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content | length %}"
        "{% set ns.seen = ns.seen + m.role[0] %}{{ ns.n }}{{ ns.seen }};{% endfor %}{{ ns.n }}"
    ),
    "previous": (
        "{% for m in messages %}{{ loop.previtem.role if not loop.first }}{{ m.content }}{% endfor %}"
    ),
    "counted back": (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and not ns.last %}"
        "{% set ns.last = messages | length - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{{ '*' if loop.index > ns.last }}{% endfor %}"
    ),
}
Turn = tuple[str, str]
turn = st.tuples(st.sampled_from(("user", "tool", "assistant")), st.text("ab", max_size=3))


def render_input(conversation: list[dict[str, Any]], **kwargs: Any) -> RenderInput:
    return RenderInput(conversation=conversation, owners=None, tools=None, kwargs=kwargs)


def fresh(rendering: Rendering) -> Segments:
    segments = Segments()
    segments.replace_tail(0, rendering.segments)
    return segments


def ends(segments: Segments, conversation: list[dict[str, Any]], rendering: Rendering) -> list[int]:
    return segments.char_ends(len(conversation), rendering.body_end).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    start=st.lists(turn, min_size=1, max_size=12),
    edits=st.lists(st.tuples(st.integers(0, 30), st.lists(turn, max_size=3), st.booleans()), max_size=8),
)
def test_resuming_after_any_edit_gives_the_whole_render(name, start, edits):
    template = ChatTemplate(TEMPLATES[name])
    conversation = [{"role": role, "content": text} for role, text in start]
    rendering = template.render_whole(render_input(conversation, bos="^", end=""))
    text, state, segments = rendering.tail, rendering.state, fresh(rendering)
    for cut, added, flip in edits:
        common = min(cut, len(conversation))
        conversation = conversation[:common] + [{"role": role, "content": said} for role, said in added]
        if not conversation:
            return
        given_now = render_input(conversation, bos="^", end="$" if flip else "")
        whole = template.render_whole(given_now)
        resumed = template.resume(given_now, state, common) if state is not None else None
        if resumed is None:
            text, state, segments = whole.tail, whole.state, fresh(whole)
            continue
        text, state = text[: resumed.kept] + resumed.tail, resumed.state
        assert text == whole.tail
        assert resumed.body_end == whole.body_end
        segments.replace_tail(resumed.kept, resumed.segments)
        assert ends(segments, conversation, resumed) == ends(fresh(whole), conversation, whole)


def long_list(size):
    return [{"role": "user", "content": str(at)} for at in range(size)]


def test_an_append_renders_only_the_new_messages():
    template = ChatTemplate(TEMPLATES["plain"])
    conversation = long_list(200)
    state = template.render_whole(render_input(conversation, bos="", end="")).state
    conversation.append({"role": "user", "content": "new"})
    resumed = template.resume(render_input(conversation, bos="", end=""), state, 200)
    assert resumed.tail == "<user>new"


def test_an_edit_far_back_resumes_from_a_sparse_snapshot():
    template = ChatTemplate(TEMPLATES["plain"])
    conversation = long_list(200)
    state = template.render_whole(render_input(conversation, bos="", end="")).state
    conversation[150] = {"role": "user", "content": "edited"}
    resumed = template.resume(render_input(conversation, bos="", end=""), state, 150)
    assert resumed.kept > 0
    assert resumed.tail.startswith("<user>128")


def test_a_value_that_only_looks_equal_is_not():
    template = ChatTemplate("{% for m in messages %}{{ flag }}{{ m.content }}{% endfor %}")
    conversation = long_list(20)
    state = template.render_whole(render_input(conversation, flag=1)).state
    assert template.resume(render_input(conversation, flag=True), state, 20).tail.startswith("True0True1")
    assert template.resume(render_input(conversation, flag=1), state, 20).kept > 0


def test_a_loop_that_begins_otherwise_is_rendered_again_behind_the_text_before_it():
    template = ChatTemplate("{{ bos }}" + TEMPLATES["counted back"])
    conversation = long_list(20)
    state = template.render_whole(render_input(conversation, bos="head")).state
    conversation += long_list(1)
    again = template.resume(render_input(conversation, bos="head"), state, 20)
    whole = template.render_whole(render_input(conversation, bos="head")).tail
    assert (again.kept, "head" + again.tail) == (len("head"), whole)
    assert template.resume(render_input(conversation, bos="another"), state, 20) is None


def test_too_much_to_render_again_is_left_to_somebody_else():
    template = ChatTemplate(TEMPLATES["plain"])
    conversation = long_list(20)
    state = template.render_whole(render_input(conversation, bos="", end="")).state
    conversation += long_list(30)
    assert template.resume(render_input(conversation, bos="", end=""), state, 20, max_steps=10) is None
