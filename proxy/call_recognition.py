"""Whose call it is, and whether there is room for what it brings."""

import msgspec

from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import AnswerFact
from lifecycle.core.state import ContextState
from lifecycle.ports import IdSource
from lifecycle.tracker import Tracker
from proxy.answer_facts import AnswerFacts
from proxy.context_finder import ContextFinder
from proxy.followed_call import FollowedCall, MessageHasher
from proxy.harness_identity import NOTHING_SAID, HarnessCall
from proxy.identity import LineageIndex
from proxy.lifecycle_fields import LifecycleFields
from proxy.limits import Limits
from proxy.modes import Modes
from proxy.relatives import Relatives
from proxy.response_chains import ResponseChains
from proxy.tracked_call import CallRequest


class CallRecognition:
    """Turns a call and what it says of itself into a request to follow it. Nothing here waits."""

    def __init__(
        self,
        tracker: Tracker,
        modes: Modes,
        lineage: LineageIndex,
        hasher: MessageHasher,
        ids: IdSource,
        limits: Limits,
        relatives: Relatives,
    ) -> None:
        self._tracker = tracker
        self._modes = modes
        self.finder = ContextFinder(lineage, hasher)
        self.chains = ResponseChains(hasher)
        self._ids = ids
        self._limits = limits
        self._relatives = relatives

    def request(
        self,
        tenant: str,
        namespace: Namespace,
        asked: FollowedCall,
        fields: LifecycleFields,
        harness: str,
        said: HarnessCall = NOTHING_SAID,
    ) -> CallRequest:
        """Find the call's context, or name the one to be opened. `said` is what its harness says of it.

        No limit fails a call: operations without room are left out, and a call that would open a context too
        many is served as a one-off of its own. The call's `x-kv-lifecycle-error` says so.
        """
        fields = self._within_op_limit(tenant, fields)
        asked = self.chains.resolved(tenant, asked)
        if asked.compacts:
            # It is a call beside the context that it sums up, not one of it.
            above = fields.ctx or fields.parent or said.context_id
            said = msgspec.structs.replace(said, context_id="")
            fields = msgspec.structs.replace(fields, ctx="", parent=above, call="", one_off=True)
        identity = self.finder.find(tenant, fields, asked, said)
        errors = (*fields.errors, *said.errors)
        closes = fields.close or (said.final and not identity.ends)
        fields = msgspec.structs.replace(fields, one_off=identity.one_off, close=closes, errors=errors)
        call_id = fields.call or self._ids.new("call")
        context_id = identity.context_id or self._ids.new("ctx")
        known = self._tracker.contexts.find(ContextKey(tenant, context_id), namespace)
        used = known is not None and known.attempts and call_id not in known.attempts
        if fields.one_off and used:
            context_id = f"{context_id}~{self._ids.new('once')}"
            known = None
        uid = known.uid if known is not None else self._ids.new("c")
        one_off = fields.one_off or (known is not None and known.one_off)
        opens = not one_off and (known is None or not known.open)
        refusal = self._limits.open_context(tenant, uid) if opens else ""
        if refusal:
            # Its own name stays free for when there is room, and its list is not remembered.
            context_id, uid = f"{context_id}~{self._ids.new('once')}", self._ids.new("c")
            one_off, errors = True, (*fields.errors, f"{refusal}; the call is a one-off")
            fields = msgspec.structs.replace(fields, one_off=True, errors=errors)
        else:
            identity = msgspec.structs.replace(identity, context_id=context_id, one_off=one_off)
            self.finder.given(tenant, identity, call_id, asked, said)
        request = CallRequest(
            tenant=tenant,
            mode=self._modes.of_context(uid, namespace.model, tenant),
            arm=self._modes.arm_of(uid, namespace, tenant),
            harness=harness,
            namespace=namespace,
            identity=msgspec.structs.replace(identity, context_id=context_id, one_off=one_off),
            uid=uid,
            call_id=call_id,
            awaits_plan=asked.num_prompts == 1 and not asked.compacts and (one_off or fields.seq is not None),
            asked=asked,
            fields=fields,
        )
        if known is None:
            self._relatives.began(request)
        return request

    def answered(self, request: CallRequest, completed: bool, facts: AnswerFacts) -> tuple[AnswerFact, ...]:
        """The call is over: what its answer looks like when it comes back, and what its id stands for."""
        told, asked, tenant = facts if completed else None, request.asked, request.tenant
        answers = self.finder.answered(tenant, request.identity, request.call_id, asked, told)
        if told is not None:
            self.chains.remember(tenant, asked, told)
        self._relatives.ended(request, told)
        return tuple(AnswerFact(a.echo, a.tool_call_ids) for a in answers)

    def forget(self, state: ContextState) -> None:
        """Somebody said that the context is over."""
        self.finder.forget(state.key.tenant, state.key.context_id, state.attempts)

    def forget_tenant(self, tenant: str) -> None:
        """Drop whatever is remembered of a tenant's conversations."""
        self.chains.forget_tenant(tenant)
        self.finder.forget_tenant(tenant)

    def _within_op_limit(self, tenant: str, fields: LifecycleFields) -> LifecycleFields:
        """The fields without the operations that there is no room for, and a word about them."""
        for index, _ in enumerate(fields.ops):
            if self._limits.operation(tenant):
                where = f"ops from number {index + 1} on" if index else "ops"
                errors = (*fields.errors, f"{where}: {self._limits.operation_refusal(tenant)}")
                return msgspec.structs.replace(fields, ops=fields.ops[:index], errors=errors)
        return fields
