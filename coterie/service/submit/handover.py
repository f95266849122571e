"""A request's way into a worker: admitted by what is known, then by the worker itself.

Counts what each replica was given. Knows no prompts and no plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coterie.core.errors import CoterieError, Unavailable, from_code
from coterie.core.events import Finished
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.ending import WHOLE
from coterie.service.roster import ServedSpecialist
from coterie.service.submit.admission import Admission
from coterie.service.submit.mailbox import EventQueue
from coterie.service.submit.replicas import ReplicaQueue, ReplicaRequest, replica_request
from coterie.workers.base import Replica


class Submitter:
    def __init__(self) -> None:
        self._admission = Admission()

    def preload(self, served: ServedSpecialist, adapters: Sequence[AdapterChoice]) -> None:
        """Loading begins before the prompt is tokenised, where the queue has a place at all."""
        replicas = served.replicas
        if replicas.ready():
            replica = replicas.pick(adapters=adapters)
            if not replicas.is_full(replica):
                replica.preload(adapters)

    def load_ahead(
        self, served: ServedSpecialist, adapters: Sequence[AdapterChoice], catalog: AdapterCatalog
    ) -> None:
        """For a request that may come: only what is installed, and while nobody has to wait."""
        replicas = served.replicas
        if not replicas.ready() or any(catalog.by_digest(a.digest) is None for a in adapters):
            return
        replica = replicas.pick(adapters=adapters)
        state = replicas.state(replica)
        if state is None or state.queued:
            return
        if not {adapter.digest for adapter in adapters}.issubset(state.resident_adapters):
            replica.preload(adapters)
            served.series.registry.value("coterie_conversation_preloads").add()

    async def enqueue(
        self, served: ServedSpecialist, assignment: Assignment, *, is_accepted: bool = False
    ) -> tuple[Replica, EventQueue]:
        """Admit by what is known, then let the worker decide; its refusal is re-planned once.
        What `is_accepted` already, as a job is, is not asked whether its time can be enough."""
        replicas, refused = served.replicas, set[str]()
        full: tuple[Replica, Rejected] | None = None
        while True:
            try:
                replica = replicas.pick(refused, assignment.adapters)
            except Unavailable:
                if full is None:
                    raise
                # somebody is there, only busy
                raise self._refusal(served, assignment, *full) from None
            state, line = replicas.state(replica), replicas.line(replica)
            if state is not None:
                if not is_accepted:
                    self._admission.check_deadline(served.name, assignment, line, state)
                assignment = self._admission.check(served.name, assignment, line, state)
            ticket = replica_request(assignment)
            line.took(ticket)
            # a slow reader holds no place: it is free when the last event comes
            mailbox = EventQueue(
                partial(self._ended, served, line, ticket), partial(line.started, ticket)
            )
            verdict: Admitted | Rejected | None = None
            try:
                verdict = await replica.submit(assignment, mailbox.put)
            finally:
                if not isinstance(verdict, Admitted) and mailbox.disarm():
                    line.gave_back(ticket)
            if isinstance(verdict, Admitted):
                return replica, mailbox
            refused.add(replica.name)
            if verdict.code == "overloaded":
                full = replica, verdict
            if len(refused) > 1 or len(refused) == len(replicas.members):
                raise self._refusal(served, assignment, replica, verdict)
            served.series.registry.value("coterie_recoveries", served.name, "replanned").add()

    def _ended(
        self,
        served: ServedSpecialist,
        line: ReplicaQueue,
        ticket: ReplicaRequest,
        event: Finished | None,
    ) -> None:
        line.gave_back(ticket)
        if event is not None and event.choices[0] in WHOLE:
            num_tokens = event.usage.completion_tokens // len(event.choices)
            self._admission.ended(served.name, ticket, num_tokens)

    def _refusal(
        self, served: ServedSpecialist, assignment: Assignment, replica: Replica, verdict: Rejected
    ) -> CoterieError:
        if verdict.code == "overloaded":
            replicas = served.replicas
            return self._admission.overloaded(
                served.name,
                assignment,
                replicas.line(replica),
                replicas.state(replica),
                verdict.retry_after_s,
            )
        return from_code(verdict.code, verdict.reason, retry_after_s=verdict.retry_after_s)
