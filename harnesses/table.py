"""The table of a run: one row a harness."""

from collections.abc import Sequence

from harnesses.run import Outcome

HEADINGS = (
    "harness",
    "API",
    "by",
    "lines",
    "contexts right/wrong",
    "edits exact/inferred/missed",
    "one-offs",
    "ends",
    "zombies",
    "held by lease",
    "live KV lost",
    "",
)


def row(outcome: Outcome) -> list[str]:
    """What came of a harness, a text a column."""
    module, v = outcome.module, outcome.verdict
    name = [module.name, module.api, module.integration]
    if not outcome.did_run:
        return [*name, *["-"] * 8, f"not run: {outcome.problem}"]
    notes = [outcome.problem] if outcome.problem else []
    notes += [f"{v.unfollowed} of {v.requests} not followed"] if v.unfollowed else []
    notes += [f"{v.unproven} chunks not proven ours"] if v.unproven else []
    notes += [f"{v.unmapped} of {v.requests} not mapped"] if v.unmapped else []
    return [
        *name,
        str(outcome.lines),
        f"{v.contexts_right}/{v.contexts_wrong}",
        f"{v.edits_exact}/{v.edits_inferred}/{v.edits_missed}",
        f"{v.one_offs_seen} of {v.one_offs}",
        f"{v.ends_seen} of {v.ends}",
        str(v.zombies),
        str(v.held),
        str(v.lost),
        "; ".join(notes),
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows under the headings, as a table for a page."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)
