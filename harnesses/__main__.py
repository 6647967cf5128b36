"""`python -m harnesses [--only NAME…] [--list] [--record DIR [--runs N]]`: one row a harness.

Exits with 1 if live KV was lost or a harness did not finish its task. See `harnesses/README.md`.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from harnesses.modules import AGENTS, CannotRun, HarnessModule, modules, prepare
from harnesses.plain import BEHAVIOURS
from harnesses.run import Outcome, run_plain, run_proxied, run_recorded
from harnesses.table import HEADINGS, markdown, row

PLAIN = {f"plain-{name}": name for name in BEHAVIOURS}


def all_modules() -> list[HarnessModule]:
    """The harnesses, and the plain agents behind them."""
    path = AGENTS.parent / "plain.py"
    plain = [HarnessModule(name=name, path=path, api="all", integration="none") for name in PLAIN]
    return [*modules(), *plain]


async def one(module: HarnessModule, recordings: Path | None, num_recorded: int) -> Outcome:
    """Run a harness; one that cannot run here says why."""
    if module.name in PLAIN:
        return await run_plain(module, PLAIN[module.name])
    try:
        environment = await prepare(module)
    except CannotRun as error:
        return Outcome(module=module, problem=str(error), did_run=False)
    if recordings is not None:
        for number in range(num_recorded):
            print(f"  recorded {await run_recorded(module, environment, recordings, number)}", flush=True)
    return await run_proxied(module, environment)


async def every(chosen: Sequence[HarnessModule], recordings: Path | None, num_recorded: int) -> bool:
    """Run all, one after the other; whether all went well."""
    rows, ok = [], True
    for module in chosen:
        outcome = await one(module, recordings, num_recorded)
        ok = ok and outcome.ok
        rows.append(row(outcome))
        print("  ".join(f"{head}: {cell}" for head, cell in zip(HEADINGS, rows[-1], strict=True)), flush=True)
        if not outcome.ok:
            print(outcome.output, flush=True)
    print(f"\n{markdown(rows)}")
    return ok


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m harnesses", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep what each harness sends, too")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="so many recordings of each")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    found = all_modules()
    unknown = set(given.only or ()) - {each.name for each in found}
    if unknown:
        parser.error(f"no harness {', '.join(sorted(unknown))}; there are {', '.join(m.name for m in found)}")
    chosen = [each for each in found if not given.only or each.name in given.only]
    if given.list:
        for each in chosen:
            print(f"{each.name:20} {each.api:10} {each.integration}")
        return
    sys.exit(0 if asyncio.run(every(chosen, given.record, given.runs)) else 1)


if __name__ == "__main__":
    main()
