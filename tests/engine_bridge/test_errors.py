"""What a caller may rely on when the bridge fails."""

import pickle

import pytest

from engine_bridge.errors import BridgeError, RejectedByEngine, TemplateMismatch, Unmappable


@pytest.mark.parametrize("kind", [Unmappable, RejectedByEngine])
def test_a_reason_survives_the_way_from_another_process(kind):
    back = pickle.loads(pickle.dumps(kind("no chat template")))
    assert type(back) is kind
    assert back.reason == str(back) == "no chat template"


def test_one_except_catches_the_whole_tree():
    for error in (Unmappable("x"), TemplateMismatch("user", 3, 10, 11)):
        assert isinstance(error, BridgeError)
    assert isinstance(RejectedByEngine("x"), Unmappable)


def test_a_mismatch_says_where():
    text = str(TemplateMismatch("tools", 3, 10, 11))
    assert "'tools'" in text
    assert "token 3" in text
