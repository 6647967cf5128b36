"""What the demo runs on is up when it says so, and says what it is."""

from lifecycle.vocabulary import Mode
from proxy.demo.backends import CpuStack
from tests.proxy.demo.small import backend, workload


async def test_a_simulated_machine_is_deployed_empty_in_the_column_s_mode() -> None:
    made = workload()
    async with backend().deployed(Mode.OBSERVE, made.working_tokens) as deployed:
        await deployed.up.runtime.prepared.wait()
        assert deployed.up.runtime.config.mode is Mode.OBSERVE
        assert deployed.up.runtime.self_test.ok
        assert not deployed.up.runtime.tracker.contexts.states
        assert deployed.runner is not None
        before = deployed.seconds()
        with deployed.pace.call():
            assert deployed.seconds() >= before


def test_a_figure_s_machine_is_marked() -> None:
    assert backend().hardware(100_000).startswith("SIMULATED")
    assert CpuStack().hardware(100_000).startswith("MEASURED")
