"""What the demo plays: sessions of a recorded trace if there is one, else a generated workload."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine_bridge.sim.traces.calls import Call
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.reader import TraceFile
from engine_bridge.sim.traces.selection import Caps, capped


class DemoWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The calls, and in words what they are and how they were cut."""

    calls: Sequence[Call]
    told: str

    @property
    def working_tokens(self) -> int:
        """Tokens of the longest list of every context that goes on: what agents come back for."""
        longest: dict[tuple[int, int], int] = {}
        for call in self.calls:
            if not call.is_one_off:
                name = (call.session, call.context)
                longest[name] = max(longest.get(name, 0), call.num_tokens)
        return sum(longest.values())


def demo_workload(trace: Path | None, caps: Caps, longest_gap_seconds: float, seed: int) -> DemoWorkload:
    """Sessions from `trace`, or made from `seed` without one; a recorded human may be away for hours, here at
    most `longest_gap_seconds`. Raises `MalformedTrace`, `OSError`."""

    def hurried(call: Call) -> Call:
        if call.gap_seconds is None or call.gap_seconds <= longest_gap_seconds:
            return call
        return msgspec.structs.replace(call, gap_seconds=longest_gap_seconds)

    if trace is None:
        made = Workload(
            seed=seed,
            num_sessions=caps.num_sessions,
            num_turns=caps.num_session_calls,
            result_tokens=900,
            compaction_tokens=caps.num_list_tokens // 3,
        )
        calls = tuple(map(hurried, capped(generated(made), caps)))
        source = f"A generated workload of coding agents (seed {seed})"
    else:
        calls = tuple(map(hurried, capped(TraceFile(trace), caps)))
        source = f"Sessions of the recorded trace {trace.name.partition('.')[0]}"
    sessions = len({call.session for call in calls})
    longest = f"{longest_gap_seconds:.0f} s"
    told = (
        f"{source}: {sessions} sessions, {len(calls)} calls, at most {caps.num_session_calls} of each; "
        f"whole messages dropped above {caps.num_list_tokens:,} tokens of a list, answers of at most "
        f"{caps.num_answer_tokens} tokens, waits of at most {longest}; texts made up to the recorded lengths."
    )
    return DemoWorkload(calls=calls, told=told)
