"""What a suite said of each case on both ways to the engine, and which differences nobody explained."""

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ABSENT = "did not run"


@dataclass(frozen=True)
class Verdict:
    """The suite's word (`passed`, `failed`, …), and what it saw, by name: parts of answers, complaints."""

    outcome: str
    saw: Mapping[str, object] = field(default_factory=dict)


Verdicts = Mapping[str, Verdict]
"""By case, in the order in which they ran."""


@dataclass(frozen=True)
class Difference:
    """One case on which the two ways disagree: by verdict, or in the named things that were seen."""

    suite: str
    case: str
    direct: Verdict
    through: Verdict

    @property
    def parts(self) -> list[str]:
        """Names of what differs; `verdict` stands for the outcome itself."""
        names = sorted({*self.direct.saw, *self.through.saw})
        changed = [name for name in names if self.direct.saw.get(name) != self.through.saw.get(name)]
        return (["verdict"] if self.direct.outcome != self.through.outcome else []) + changed


@dataclass(frozen=True)
class Explanation:
    """A difference that was looked at and stays. `suite`, `case` and `parts` are shell patterns.

    It covers a difference only if its patterns cover each part: what differs in one thing more is new.
    """

    suite: str
    case: str
    parts: tuple[str, ...]
    reason: str

    def covers(self, difference: Difference) -> bool:
        return (
            fnmatch.fnmatchcase(difference.suite, self.suite)
            and fnmatch.fnmatchcase(difference.case, self.case)
            and all(any(fnmatch.fnmatchcase(part, each) for each in self.parts) for part in difference.parts)
        )


def differences(suite: str, direct: Verdicts, through: Verdicts) -> list[Difference]:
    """Cases that ran on one way only are differences too."""
    nothing = Verdict(ABSENT)
    pairs = (
        Difference(suite, case, direct.get(case, nothing), through.get(case, nothing))
        for case in {**direct, **through}
    )
    return [each for each in pairs if each.parts]


def read_explanations(path: Path) -> list[Explanation]:
    """The reviewed file. Raises `ValueError` where an entry has no reason or something is misspelt."""
    entries = tomllib.loads(path.read_text()).get("difference", [])
    try:
        found = [Explanation(**{**entry, "parts": tuple(entry["parts"])}) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: an entry needs suite, case, parts and reason: {error}") from error
    if any(not each.reason.strip() for each in found):
        raise ValueError(f"{path.name}: every difference needs a reason")
    return found


def explain(
    found: Sequence[Difference], explanations: Sequence[Explanation]
) -> list[tuple[Difference, Explanation | None]]:
    """Each difference with the first explanation that covers it."""
    return [(each, next((one for one in explanations if one.covers(each)), None)) for each in found]
