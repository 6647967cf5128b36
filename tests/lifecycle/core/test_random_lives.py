"""The steps of the machine with the odds of busy agents: denser lives than a search for failures draws."""

import random

import pytest

from lifecycle.vocabulary import WaitKind
from tests.lifecycle.core.lifecycle_steps import WORDS
from tests.lifecycle.core.test_lifecycle_machine import Lives

NUM_STEPS = 60
WAITS = [WaitKind.TOOL, WaitKind.UNKNOWN, WaitKind.HUMAN, WaitKind.SUBAGENT]
STEPS = {
    "arrive": 8.0,
    "map": 8.0,
    "first": 8.0,
    "end": 7.0,
    "generate": 6.0,
    "goes_on": 4.0,
    "declare": 4.5,
    "edit": 3.0,
    "tick": 3.0,
    "map_none": 0.8,
    "another_context": 0.4,
    "now_and_then": 0.4,
}


def step(lives: Lives, rng: random.Random) -> None:
    """One step of one context."""
    number, which = rng.randrange(1 << 16), rng.randrange(1 << 16)
    start = rng.randrange(5)
    span = (start, start + rng.randint(1, 3))
    wait = rng.choice(WAITS)
    match rng.choices(list(STEPS), list(STEPS.values()))[0]:
        case "arrive":
            lives.arrive(
                number,
                more=[rng.choice(WORDS) for _ in range(rng.randint(0, 2))],
                at=rng.choice([None, None, None, rng.randint(0, 6)]),
                keep=rng.random() < 0.7,
                retry=rng.random() < 0.2,
                pins=[span] if rng.random() < 0.15 else [],
                closes=rng.random() < 0.02,
                tells=rng.random() < 0.3,
            )
        case "map":
            lives.map(number, which, frozenset(rng.sample(["a1", "a2", "u2"], rng.choice([0, 0, 0, 1, 2]))))
        case "first":
            lives.first(number, which)
        case "end":
            lives.end(number, which, rng.random() < 0.75, wait)
        case "generate":
            lives.generate(number, which, rng.choice(["a1", "a2", "a3"]), rng.randint(0, 1))
        case "goes_on":
            lives.goes_on(number)
        case "declare":
            kind = rng.choice(["append", "pin", "pin", "pin", "unpin", "wait", "lost", "late"])
            lives.declare(number, kind, span, rng.choice([10, 300, 3600]), wait)
        case "edit":
            lives.edit(number, span, rng.randint(0, 2), rng.random() < 0.7)
        case "tick":
            odds = {0.5: 5.0, 4.0: 2.0, 5.5: 2.0, 30.0: 3.0, 61.0: 2.0, 901.0: 0.3, 4000.0: 0.1}
            lives.tick(rng.choices(list(odds), list(odds.values()))[0])
        case "map_none":
            lives.map_none(number, which, True)
        case "another_context" if len(lives.twins) < 4:
            upto = rng.choice([None, rng.randint(0, 5)])
            lives.another_context(number, upto, rng.random() < 0.2, rng.random() < 0.7)
        case "now_and_then":
            lives.now_and_then(number, rng.choice(["snapshot", "close", "closed by its agent"]))


@pytest.mark.parametrize("seed", range(50))
def test_both_agree_all_along(seed: int) -> None:
    rng = random.Random(seed)
    lives = Lives()
    lives.first_context(rng.random() < 0.1)
    for _ in range(NUM_STEPS):
        step(lives, rng)
        lives.both_hold_the_same()
        lives.references_are_a_recount()
        lives.calls_and_pins_and_the_last_list_are_live()
        lives.what_is_reclaimed_is_dead_in_every_context_and_all_that_is_dead_is()
    lives.time_never_runs_backwards()
    lives.teardown()
