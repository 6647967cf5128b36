"""`python -m harnesses.contract_run [NAME…]`: each adapter held against its installed harness.

`harnesses/contracts/<module>_contract.py` is run by that harness's own interpreter before a proxy with the
scripted model, its page of documentation included. Exits with 1 if one fails.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog
from msgspec.structs import replace

from harnesses.modules import ROOT, CannotRun, Environment, HarnessModule, modules, prepare
from harnesses.run import drive
from harnesses.world import proxied_model

CONTRACTS = ROOT / "harnesses" / "contracts"
PAGES = ROOT / "docs" / "adapters"


def contract_of(module: HarnessModule) -> Path:
    """Where the contract of a harness's adapter is, if there is one."""
    return CONTRACTS / f"{module.path.stem}_contract.py"


async def check(module: HarnessModule) -> str:
    """Run a contract; answers what is wrong, empty for nothing."""
    try:
        environment = await prepare(module)
    except CannotRun as error:
        return f"cannot run here: {error}"
    own = {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "sdk"), str(CONTRACTS))),
        "HARNESS_PAGE": str(PAGES / f"{module.name}.md"),
    }
    environment = Environment(environment.python, {**environment.variables, **own})
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        async with proxied_model(Path(name)) as world:
            tested = replace(module, path=contract_of(module))
            problem, output = await drive(
                tested, environment, Path(name), world.up.data_url, world.up.admin_url, world.model
            )
    return f"{problem}\n{output}" if problem else ""


async def every(chosen: Sequence[HarnessModule]) -> bool:
    """Check all, one after the other; whether all hold."""
    held = True
    for module in chosen:
        wrong = await check(module)
        print(f"contract of {module.name}: {wrong or 'holds'}", flush=True)
        held = held and (not wrong or wrong.startswith("cannot run here"))
    return held


def main() -> None:
    """The command."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    wanted = set(sys.argv[1:])
    found = [each for each in modules() if contract_of(each).exists()]
    sys.exit(0 if asyncio.run(every([m for m in found if not wanted or m.name in wanted])) else 1)


if __name__ == "__main__":
    main()
