"""docs/wire.md names every field, operation and endpoint that there is, and no other."""

import re
from typing import get_args

import msgspec

from lifecycle import vocabulary
from lifecycle.core.observations import Operation
from proxy.lifecycle_fields import LifecycleFields
from tests.architecture.deployment import REPOSITORY

PAGE = (REPOSITORY / "docs" / "wire.md").read_text()
ADMIN = "".join(
    (REPOSITORY / "proxy" / f"{name}_api.py").read_text()
    for name in ("admin", "health", "report", "status", "backends")
)


def table(heading: str) -> set[str]:
    """Names in code in the first column of the table that begins with this heading."""
    rows = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def test_keys_of_a_call():
    ours = {"pins", "origin", "errors"}
    fields = {field.name for field in msgspec.structs.fields(LifecycleFields)} - ours | {
        "pin",
        "unpin",
        "ops",
    }
    assert table("key") | {"ops"} == fields


def test_operations():
    assert table("op") == {kind.__struct_config__.tag for kind in get_args(Operation)}


def test_headers():
    names = {value for name, value in vars(vocabulary).items() if name.endswith("_HEADER")}
    assert names == set(re.findall(r"x-kv-[a-z-]+", PAGE))


def test_admin_endpoints():
    routes = set(re.findall(r"@app\.(?:get|post|patch|delete)\(\"([^\"]+)\"\)", ADMIN))
    assert {re.sub(r"^[A-Z]+ ", "", name).split("?")[0] for name in table("endpoint")} == routes
