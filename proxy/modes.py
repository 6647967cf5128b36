"""Which mode holds for a model and tenant, now. Changed at run time, read on every call."""

import hashlib

import msgspec

from lifecycle.vocabulary import Mode
from proxy.config import Config, ModeRule

_HOLDOUT_SCALE = 1 << 32


class Modes:
    """Mode rules in force. The most specific wins: model and tenant, model, tenant, neither.

    Above every rule stand `bypass_all`, the emergency switch, and `unfollowed`: the books are not read yet.
    """

    def __init__(self, config: Config) -> None:
        self._default = config.mode
        self._rules = {(r.model, r.tenant): r.mode for r in config.modes}
        self.holdout = config.holdout
        self.bypass_all = False
        self.unfollowed = False

    @property
    def pipes_everything(self) -> bool:
        """Whether every call is in bypass, whatever the rules say."""
        return self.bypass_all or self.unfollowed

    def of(self, model: str, tenant: str) -> Mode:
        """The mode for a call."""
        if self.pipes_everything:
            return Mode.BYPASS
        for key in ((model, tenant), (model, ""), ("", tenant)):
            if key in self._rules:
                return self._rules[key]
        return self._default

    def of_context(self, uid: str, model: str, tenant: str) -> Mode:
        """The mode for a context: one in the holdout observes for all its life, whatever is enforced."""
        mode = self.of(model, tenant)
        return Mode.OBSERVE if mode is Mode.ENFORCE and self.held_out(uid) else mode

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
        }
