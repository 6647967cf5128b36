"""No range holds a word of a later message, on real templates."""

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.template import ChatTemplate, RenderInput, compiled
from tests.engine_bridge.mapping.conversations import TOOLS, template_files, toy_profile

KINDS = ["sys", "user", "call", "tool", "answer", "user", "call", "tool"]


def word(index, field):
    return f"m{index}{field}q"


def conversation():
    messages = []
    for at, kind in enumerate(KINDS):
        text = f"{word(at, 'a')} {word(at, 'b')}"
        if kind == "sys":
            messages.append({"role": "system", "content": text})
        elif kind == "call":
            function = {"name": "run", "arguments": f'{{"a": "{word(at, "c")}"}}'}
            call = {"id": f"call{at:05d}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
        elif kind == "tool":
            messages.append(
                {"role": "tool", "tool_call_id": f"call{at - 1:05d}", "name": "run", "content": text}
            )
        else:
            messages.append({"role": "user" if kind == "user" else "assistant", "content": text})
    return messages


def check_ranges(path):
    mapper = ChatMapper(toy_profile(path.read_text()))
    messages = conversation()
    checked = 0
    for size in range(1, len(messages) + 1):
        try:
            mapped = mapper.map(ChatPrompt(messages=messages[:size], tools=TOOLS))
        except Unmappable:
            continue
        checked += 1
        ids = mapped.token_ids.tolist()
        decode = mapper.profile.tokenizer.backend.decode
        for at, end in enumerate((mapped.head_end, *mapped.message_ends)):
            text = decode(ids[:end], skip_special_tokens=False)
            for later in range(at, size):
                assert not any(word(later, field) in text for field in "abc"), (size, at, later)
        tail = decode(ids[mapped.message_ends[-1] :], skip_special_tokens=False)
        assert not any(word(at, field) in tail for at in range(size) for field in "abc")
    return checked


@pytest.mark.parametrize("path", template_files()[7::60], ids=lambda path: path.stem)
def test_sampled_templates_give_no_message_a_later_ones_words(path):
    check_ranges(path)


@pytest.mark.corpus
@pytest.mark.parametrize("path", template_files(), ids=lambda path: path.stem)
def test_no_template_of_the_corpus_gives_a_message_a_later_ones_words(path):
    try:
        check_ranges(path)
    except Unmappable as error:
        pytest.skip(error.reason)


def messages(*texts):
    return RenderInput(
        conversation=[{"role": "user", "content": text} for text in texts], owners=None, tools=None, kwargs={}
    )


def test_moved_content_stays_with_its_message():
    source = "{{ messages[-1].content }}|{% for m in messages %}{{ m.content }};{% endfor %}"
    rendering = ChatTemplate(source).render_whole(messages("aa", "bb"))
    assert rendering.tail == "bb|aa;bb;"
    assert rendering.segments[0] == (0, 1)


def test_contents_are_looked_up_when_strings_cannot_be_followed():
    source = "{% for m in messages %}<{{ m.content }}{{ m.content.runs }}>{% endfor %}"
    rendering = ChatTemplate(source).render_whole(messages("aa", "bb"))
    text = rendering.tail
    assert [text[start:][:2] for start, owner in rendering.segments if owner >= 0] == ["aa", "bb"]


def test_a_template_that_refuses_rejects():
    with pytest.raises(RejectedByEngine):
        ChatTemplate("{{ raise_exception('no') }}").render_whole(messages("aa"))


def test_a_template_that_does_not_parse_is_unmappable():
    with pytest.raises(Unmappable):
        ChatTemplate("{% for %}")


def test_compiling_happens_once():
    assert compiled("{{ messages }}") is compiled("{{ messages }}")
