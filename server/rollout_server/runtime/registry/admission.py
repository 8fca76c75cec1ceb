"""Validates start requests and fills in defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.error import Busy, InvalidRequest, NotFound, Violation
from rollout_server.core.fingerprint import SpecEncoder, fingerprint
from rollout_server.core.spec_validation import Bounds, length_violations, settle, violations
from rollout_server.runtime.agent_protocol import AgentProtocol
from rollout_server.runtime.registry.interruption import check_resumable
from rollout_server.runtime.start_request import AdmittedStart, Capacity, StartRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAdmission:
    """What requests are validated with. Has no state, so any thread may use it. `durable`: the server has a journal."""

    agents: Mapping[str, AgentProtocol]
    default_agent: str
    bounds: Bounds
    capacity: Capacity
    durable: bool

    def agent(self, name: str) -> AgentProtocol:
        """Return the agent of that name, or the default agent for an empty name. Raise `NotFound`."""
        agent = self.agents.get(name or self.default_agent)
        if agent is None:
            raise NotFound(f"there is no agent {name!r}; there are {sorted(self.agents)}", reason="AGENT_NOT_FOUND")
        return agent

    def admit(self, request: StartRequest, also_wrong: Iterable[Violation] = ()) -> AdmittedStart:
        """Validate a request and fill in defaults. Raise `RolloutError`.

        `also_wrong` are violations that the caller of this method found. They are reported together with those found here, at
        most one per field.
        """
        wrong = [*violations(request.spec, self.bounds), *length_violations(request.request_id, "request_id")]
        named = {violation.field for violation in wrong}
        wrong += [violation for violation in also_wrong if violation.field not in named]
        if wrong:
            raise InvalidRequest(*wrong)
        agent = self.agent(request.spec.agent)
        check_resumable(request.spec, agent, durable=self.durable, request_id=request.request_id)
        return self._settled(request, agent, SpecEncoder())

    def admit_alike(
        self, requests: Sequence[StartRequest], also_wrong: Iterable[Violation] = ()
    ) -> Sequence[AdmittedStart]:
        """Return what `admit` returns for each request. They differ only in their ids and `group_index`; the last has the longest.

        Only the last one is validated, and what they share is encoded once: a large request for a large group would take minutes.
        Raises `Busy` before that if the server never has room for all of them.
        """
        *others, last = requests
        admitted, most = self.admit(last, also_wrong), self.capacity.active_bytes
        size = len(requests) * admitted.size
        if others and size > most:
            text = f"{len(requests):,} rollouts need {size:,} bytes, at most {most:,} are allowed (ROLLOUT_MAX_ACTIVE_BYTES)"
            raise Busy(f"{text}; start fewer at once", retry_after=1.0, reason="TOO_MANY_BYTES")
        encoder = SpecEncoder()
        return [*(self._settled(each, admitted.agent, encoder) for each in others), admitted]

    def _settled(self, request: StartRequest, agent: AgentProtocol, encoder: SpecEncoder) -> AdmittedStart:
        """Return a valid request with defaults filled in."""
        spec = settle(request.spec, agent.name, agent.limits, self.bounds)
        known_by = fingerprint(request.spec, spec, encoder) if request.request_id else ""
        return AdmittedStart(replace(request, spec=spec), agent, known_by)
