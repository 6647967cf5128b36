"""Which mode holds for a model and tenant, now. Changed at run time, read on every call."""

import hashlib
from collections.abc import Callable, Collection

import msgspec

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Arm, Mode
from proxy.config import Config, ModeRule

_HOLDOUT_SCALE = 1 << 32


def _nobody() -> Collection[tuple[str, str]]:
    return ()


class Modes:
    """Mode rules in force. The most specific wins: model and tenant, model, tenant, neither.

    Models in `observe_only` are not enforced, whatever a rule says: our tokens are not the engine's.
    Above every rule stand `bypass_all`, the emergency switch, and `unfollowed`: the books are not read yet.
    """

    def __init__(self, config: Config, demoted: Callable[[], Collection[tuple[str, str]]] = _nobody) -> None:
        self.take(config)
        self.bypass_all = False
        self.observe_only: set[str] = set()
        self.unfollowed = False
        self._demoted = demoted

    @property
    def pipes_everything(self) -> bool:
        """Whether every call is in bypass, whatever the rules say."""
        return self.bypass_all or self.unfollowed

    def of(self, model: str, tenant: str) -> Mode:
        """The mode for a call."""
        if self.pipes_everything:
            return Mode.BYPASS
        keys = ((model, tenant), (model, ""), ("", tenant))
        mode = next((self._rules[key] for key in keys if key in self._rules), self._default)
        held_back = model in self.observe_only or (model, tenant) in self._demoted()
        return Mode.OBSERVE if mode is Mode.ENFORCE and held_back else mode

    def of_context(self, uid: str, model: str, tenant: str) -> Mode:
        """The mode for a context: one in the holdout observes for all its life, whatever is enforced."""
        mode = self.of(model, tenant)
        return Mode.OBSERVE if mode is Mode.ENFORCE and self.held_out(uid) else mode

    def arm_of(self, uid: str, namespace: Namespace, tenant: str) -> Arm:
        """How a call of the context runs, for comparison. Where no mapping is known nothing is enforced."""
        if not namespace.fingerprint or self.of(namespace.model, tenant) is not Mode.ENFORCE:
            return Arm.OBSERVE
        return Arm.HOLDOUT if self.held_out(uid) else Arm.ENFORCE

    def held_out(self, uid: str) -> bool:
        """Whether the context belongs to the share that stays in observe; the same after a restart."""
        draw = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=4).digest(), "big")
        return draw < self.holdout * _HOLDOUT_SCALE

    def set(self, rule: ModeRule) -> None:
        """Put a rule in force; an empty model and tenant sets the default."""
        if not rule.model and not rule.tenant:
            self._default = rule.mode
        else:
            self._rules[rule.model, rule.tenant] = rule.mode

    def take(self, config: Config) -> None:
        """These rules and this holdout, and none of those from before."""
        self._default = config.mode
        self._rules = {(r.model, r.tenant): r.mode for r in config.modes}
        self.holdout = config.holdout

    def describe(self) -> dict[str, object]:
        """What is in force, for the admin API."""
        return {
            "mode": self._default,
            "modes": [
                msgspec.to_builtins(ModeRule(mode=m, model=k[0], tenant=k[1]))
                for k, m in sorted(self._rules.items())
            ],
            "holdout": self.holdout,
            "bypass_all": self.bypass_all,
            "demoted": [{"model": model, "tenant": tenant} for model, tenant in sorted(self._demoted())],
        }
