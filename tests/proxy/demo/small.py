"""A demo small enough for a test: a few calls before a machine that takes no time."""

from engine_bridge.sim.hardware import INSTANT
from engine_bridge.sim.traces.selection import Caps
from proxy.demo.backends import Simulated
from proxy.demo.workload import DemoWorkload, demo_workload

CAPS = Caps(
    num_sessions=2,
    num_session_calls=14,
    num_calls=28,
    num_list_tokens=12_000,
    num_new_tokens=1_000_000,
    num_answer_tokens=4,
)
NUM_CONCURRENT = 2
SEED = 3
GAP_SECONDS = 30.0


def backend() -> Simulated:
    return Simulated(INSTANT, speed=400, hbm_share=4.0, l1_share=8.0)


def workload() -> DemoWorkload:
    return demo_workload(None, CAPS, GAP_SECONDS, SEED)
