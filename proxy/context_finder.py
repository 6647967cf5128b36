"""Whose a call is, and what must be remembered of it so that the next one is known: no books, no limits."""

from collections.abc import Container, Sequence

import msgspec

from proxy.answer_facts import AnswerFacts
from proxy.followed_call import FollowedCall, MessageHasher, MessageShape
from proxy.harness_identity import HarnessCall
from proxy.identity import Identity, identify
from proxy.inference import Inference
from proxy.lifecycle_fields import LifecycleFields
from proxy.lineage import LineageIndex


class ContextFinder:
    """The ladder with its memory of lists and of texts. Nothing here waits."""

    def __init__(self, lineage: LineageIndex, hasher: MessageHasher) -> None:
        self._lineage = lineage
        self._hasher = hasher
        self._texts = Inference(hasher)

    def find(self, tenant: str, fields: LifecycleFields, asked: FollowedCall, said: HarnessCall) -> Identity:
        """The call's context by the first rung that knows. Remembers nothing."""
        return identify(tenant, fields, asked, self._lineage, said, self._texts)

    def given(
        self, tenant: str, identity: Identity, call_id: str, asked: FollowedCall, said: HarnessCall
    ) -> None:
        """The call was given to `identity.context_id`."""
        num_old = self._lineage.observe_call(
            tenant,
            identity.context_id,
            call_id,
            asked,
            groups=said.groups,
            window=said.window,
            one_off=identity.one_off,
            beside=identity.parent if identity.one_off else "",
        )
        if not identity.one_off:
            self._texts.observe_call(tenant, identity.context_id, asked, num_old, said.groups)

    def answered(
        self, tenant: str, identity: Identity, call_id: str, asked: FollowedCall, facts: AnswerFacts | None
    ) -> Sequence[MessageShape]:
        """The call is over; `facts` are its answer if it completed. What that looks like when it comes
        back."""
        choices = facts.choices if facts is not None else ()
        answers = [self._hasher.shape(choice.message()) for choice in choices]
        if asked.conversation is not None and facts is not None and facts.response_id:
            answers = [
                msgspec.structs.replace(a, tool_call_ids=(*a.tool_call_ids, facts.response_id))
                for a in answers
            ]
        self._lineage.observe_end(tenant, identity.context_id, call_id, answers)
        own = not identity.one_off
        self._texts.observe_end(tenant, identity.context_id if own else identity.parent, choices, own=own)
        return answers

    def forget(self, tenant: str, context_id: str, recorded: Container[str]) -> None:
        """The context is over: no list goes on with its own. Unless its last call is under way, or not among
        the `recorded` ones yet: then it is begun again."""
        if self._lineage.is_done(tenant, context_id, recorded):
            self._lineage.forget(tenant, context_id)
            self._texts.forget(tenant, context_id)

    def forget_tenant(self, tenant: str) -> None:
        """Drop everything that is remembered of a tenant's lists and texts."""
        self._lineage.forget_tenant(tenant)
        self._texts.forget_tenant(tenant)
