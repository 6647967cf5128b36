"""Templates run here as transformers runs them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from engine_bridge.mapping.environment import (
    ChatEnvironment,
    detect_content_format,
    supports_developer,
    template_variables,
    wants_system_first,
)

SNIPPETS = (
    "{{ v | tojson }}|{{ v | tojson(indent=2) }}",
    "{% for x in v %}{{ loop.index }}{{ loop.last }}{{ x }}{% if loop.first %}{% continue %}{% endif %};"
    "{% endfor %}",
    "{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.c is defined }}{{ ns.b }}",
    "{{ v.items is defined }}{{ v.get is defined }}{{ v.key }}{{ v['key'] }}{{ v.missing is defined }}",
    "{% generation %}{{ v }}{% endgeneration %}",
    "{% if v is mapping %}{% for k, x in v.items() %}{{ k }}={{ x }}{% endfor %}"
    "{% else %}{{ v | string }}{% endif %}",
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab<&é", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("key", "items", "get", "x")), inner, max_size=3)
    ),
    max_leaves=6,
)


def outcome(template, value):
    try:
        return template.render(v=value)
    except Exception as error:  # noqa: BLE001 - whatever it raises, both must raise it
        return type(error)


@given(values)
def test_snippets_render_as_under_transformers(value):
    environment = ChatEnvironment()
    for source in SNIPPETS:
        theirs = chat_template_utils._compile_jinja_template(source)
        assert outcome(environment.from_string(source), value) == outcome(theirs, value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set x = messages %}{% for m in x[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro r(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ r(m.content) }}{% endfor %}",
            "openai",
        ),
        ("{% macro r(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ r(1) }}", "string"),
        ("{% set content = 1 %}{% for p in content %}{% endfor %}", "openai"),
    ],
)
def test_the_content_format_follows_the_loops_over_contents(source, expected):
    assert detect_content_format(source) == expected


def test_only_undeclared_names_are_variables():
    source = "{% set a = b %}{{ a }}{{ c.d }}{% for e in f %}{{ e }}{% endfor %}"
    assert template_variables(source) == {"b", "c", "f"}


def test_developer_support_is_a_quoted_word():
    assert supports_developer("{% if m.role == 'developer' %}")
    assert not supports_developer("{# developer #}")


def test_a_template_that_refuses_later_system_messages_or_cannot_be_tried_wants_them_first():
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    refusing = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    refusing += "{{ raise_exception('x') }}{% endif %}{% endfor %}"
    assert not wants_system_first(loop)
    assert wants_system_first(refusing)
    assert wants_system_first("{{ strftime_now('%Y') }}" + loop), "the engine tries it without that name"
