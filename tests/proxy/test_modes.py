"""The most specific rule wins, the switch stands above, and the holdout never changes its mind."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Arm, Mode
from proxy.config import Config, ModeRule
from proxy.modes import Modes

NAMES = st.sampled_from(["", "a", "b"])


def test_the_most_specific_rule_wins() -> None:
    modes = Modes(
        Config(
            mode=Mode.OBSERVE,
            modes=(
                ModeRule(mode=Mode.ENFORCE, model="m"),
                ModeRule(mode=Mode.BYPASS, tenant="t"),
                ModeRule(mode=Mode.OBSERVE, model="m", tenant="t"),
            ),
        )
    )
    assert modes.of("m", "x") is Mode.ENFORCE
    assert modes.of("x", "t") is Mode.BYPASS
    assert modes.of("m", "t") is Mode.OBSERVE
    assert modes.of("x", "x") is Mode.OBSERVE
    modes.set(ModeRule(mode=Mode.ENFORCE))
    assert modes.of("x", "x") is Mode.ENFORCE
    assert modes.of("x", "t") is Mode.BYPASS
    modes.bypass_all = True
    assert modes.of("m", "x") is Mode.BYPASS
    modes.bypass_all = False
    modes.unfollowed = True
    assert modes.pipes_everything
    assert modes.of("m", "x") is Mode.BYPASS
    modes.unfollowed = False
    assert modes.of("m", "x") is Mode.ENFORCE


def test_a_model_whose_tokens_we_do_not_know_is_not_enforced() -> None:
    modes = Modes(Config(mode=Mode.ENFORCE))
    modes.observe_only = {"m"}
    assert modes.of("m", "t") is Mode.OBSERVE
    assert modes.of("other", "t") is Mode.ENFORCE
    modes.set(ModeRule(mode=Mode.BYPASS, model="m"))
    assert modes.of("m", "t") is Mode.BYPASS


@given(st.lists(st.builds(ModeRule, mode=st.sampled_from(Mode), model=NAMES, tenant=NAMES)), NAMES, NAMES)
def test_what_is_described_is_what_holds(rules: list[ModeRule], model: str, tenant: str) -> None:
    modes = Modes(Config())
    for rule in rules:
        modes.set(rule)
    shown = modes.describe()
    again = Modes(msgspec.convert({"mode": shown["mode"], "modes": shown["modes"]}, Config))
    assert again.of(model, tenant) is modes.of(model, tenant)


def test_the_holdout_is_a_share_of_contexts_each_for_all_its_life() -> None:
    modes = Modes(Config(mode=Mode.ENFORCE, holdout=0.2))
    uids = [f"c_{n}" for n in range(5_000)]
    held = {uid for uid in uids if modes.of_context(uid, "m", "t") is Mode.OBSERVE}
    assert 0.17 < len(held) / len(uids) < 0.23
    assert held == {uid for uid in uids if Modes(Config(holdout=0.2)).held_out(uid)}
    modes.holdout = 0.3
    assert held < {uid for uid in uids if modes.held_out(uid)}
    modes.set(ModeRule(mode=Mode.BYPASS))
    assert {modes.of_context(uid, "m", "t") for uid in uids} == {Mode.BYPASS}


def test_who_lost_control_observes_and_each_call_says_how_it_ran() -> None:
    demoted: dict[tuple[str, str], object] = {}
    modes = Modes(Config(mode=Mode.ENFORCE, holdout=0.5), lambda: demoted)
    mapped = Namespace("m", "", "known")
    uids = [f"c_{n}" for n in range(50)]
    for uid in uids:
        assert (modes.arm_of(uid, mapped, "t") is Arm.HOLDOUT) == modes.held_out(uid)
        assert modes.arm_of(uid, Namespace("m"), "t") is Arm.OBSERVE
    demoted["m", "t"] = "exceeded"
    assert {modes.of_context(uid, "m", "t") for uid in uids} == {Mode.OBSERVE}
    assert {modes.arm_of(uid, mapped, "t") for uid in uids} == {Arm.OBSERVE}
    assert modes.of("m", "other") is modes.of("other", "t") is Mode.ENFORCE
    assert modes.describe()["demoted"] == [{"model": "m", "tenant": "t"}]
    modes.set(ModeRule(mode=Mode.BYPASS, model="m"))
    assert modes.of("m", "t") is Mode.BYPASS
