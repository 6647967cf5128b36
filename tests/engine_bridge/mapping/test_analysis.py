"""Which templates can be resumed, and how far an iteration looks ahead."""

import pytest

from engine_bridge.mapping.analysis import NotResumable, plan_loop
from engine_bridge.mapping.environment import ChatEnvironment


def plan(source):
    return plan_loop(ChatEnvironment().parse(source))


@pytest.mark.parametrize(
    ("body", "lookahead"),
    [
        ("{{ m.content }}", 0),
        ("{{ m.content }}{% if loop.last %}!{% endif %}", 1),
        ("{% if loop.nextitem is defined %}{{ m.content }}{% endif %}", 1),
        ("{{ messages[loop.index0 - 1].role }}{{ m.content }}", 0),
        ("{{ messages[loop.index0 + 2].role }}", 2),
        ("{{ messages[0].role }}{{ m.content }}", 0),
        ("{% if loop.index0 == messages | length - 1 %}!{% endif %}{{ m.content }}", 2),
    ],
)
def test_look_ahead_is_bounded_by_what_the_loop_reads(body, lookahead):
    assert plan("{% for m in messages %}" + body + "{% endfor %}").lookahead == lookahead


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ messages[k].content }}{% endfor %}",
        "{% macro f() %}{{ messages }}{% endmacro %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ strftime_now('%H') }}{{ m.content }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    ],
)
def test_unbounded_dependence_means_a_whole_render(source):
    with pytest.raises(NotResumable):
        plan(source)


def test_the_loop_over_a_slice_or_an_alias_is_found():
    assert (
        plan("{% set rest = messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}").loop.lineno == 1
    )


def test_values_read_in_the_loop_are_named():
    got = plan("{% set a = 1 %}{% for m in messages %}{{ a }}{{ bos }}{{ m.content }}{% endfor %}{{ after }}")
    assert got.free == ("a", "bos")


def test_owners_follow_from_the_loop_only_if_nothing_else_writes_messages():
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert plan("{{ messages[0].content }}" + loop).marks_suffice
    assert not plan(loop + "{{ messages[-1].content }}").marks_suffice
    assert not plan("{% set last = messages[-1] %}" + loop + "{{ last.content }}").marks_suffice
    assert not plan(loop + "{% for m in messages if m.x %}{{ m.x }}{% endfor %}").marks_suffice
    assert not plan("{% for m in messages %}{{ loop.nextitem.content }}{% endfor %}").marks_suffice
    assert not plan(
        "{% set d = tools %}{% for m in messages %}{{ d }}{{ m.content }}{% endfor %}"
    ).marks_suffice
