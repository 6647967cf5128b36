"""The report of a log told by hand, as a test tool."""

from lifecycle.projections.report import Report
from lifecycle.projections.report_harm import HarmBudget
from tests.lifecycle.projections.tale import Tale

BUDGET = HarmBudget(share=0.01, window_seconds=3600, floor_prompt_tokens=100, min_calls=2)


def told(tale: Tale, budget: HarmBudget = BUDGET) -> Report:
    report = Report(budget)
    for recorded in tale.log:
        report.apply(recorded)
    return report
