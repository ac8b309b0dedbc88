"""Records the story of each interruption while it happens: evidence, meaning, actions, and options not taken.

An incident lasts from the first evidence until the next world runs: its ranks step, or stay alive there for a while. A
failure of a node that took part in the next world is another incident, although nothing has run yet. The failure of a
node that never took part belongs to the same incident: such a node, found dead while its peers restart, caused what
they reported.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from perdure.contract import (
    Action,
    Considered,
    Evidence,
    EvidenceSource,
    FailureClass,
    Hang,
    IncidentView,
    RankStarts,
    Restore,
    RestoreSource,
    Slowness,
    Stop,
    Suspect,
)
from perdure.contract.base import shorten
from perdure.workflows.policy.checkpoints import memory_findings
from perdure.workflows.policy.diagnosis.classification import failed_by_themselves
from perdure.workflows.policy.diagnosis.suspicion import without
from perdure.workflows.policy.record.action_words import words
from perdure.workflows.policy.record.incident_texts import within_budget
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure

KEPT_INCIDENTS = 50
"""Incidents that a job keeps and carries through continue-as-new. Older ones are in the workflow's history."""

KEPT_EVIDENCE = 24

_LOG_TAIL = 2000

_MOST_STEPS = 10**15
_LONGEST_REWORK = 1e9
"""Seconds, 30 years. Numbers of steps are what a script says, and greater ones would only overflow."""


def add_evidence(
    state: RoleInJob, evidence: Evidence, *, now: datetime, log_tail: str = "", is_cause: bool = False
) -> RoleInJob:
    """Adds evidence to the open incident, or opens one. The output of the first node is kept, and that of the first
    cause instead of it."""
    # The clock of a node may be ahead, and nothing is reported before it happens.
    evidence = evidence.replace(time=min(evidence.time, now))
    incident = state.open_incident
    if incident is None:
        incident = IncidentView(
            number=state.incident_count + 1,
            role=state.role,
            title=shorten(evidence.text),
            started_at=evidence.time,
            noticed_at=now,
            evidence=(evidence,),
            generation_before=state.generation,
            nodes_before=state.world.nodes if state.world else 0,
            step_before=state.progress.step if state.progress else None,
            log_tail=log_tail[-_LOG_TAIL:],
        )
        return state.replace(
            incidents=within_budget((*state.incidents, incident)[-KEPT_INCIDENTS:]),
            incident_count=state.incident_count + 1,
        )
    known = incident.evidence
    # A thousand nodes may fail at once: most of their texts differ, and texts are compared fast.
    repeated = any(one.text == evidence.text and one == evidence for one in known)
    return _replace(
        state,
        incident.replace(
            evidence=known if repeated else (*known, evidence)[-KEPT_EVIDENCE:],
            started_at=min(incident.started_at, evidence.time),
            log_tail=(is_cause and log_tail[-_LOG_TAIL:]) or incident.log_tail or log_tail[-_LOG_TAIL:],
        ),
    )


def record_decision(
    state: RoleInJob,
    *,
    now: datetime,
    title: str,
    rule: str,
    actions: tuple[Action, ...],
    failure: FailureClass | None = None,
    culprit: int | None = None,
    considered: tuple[Considered, ...] = (),
    also_failed: Collection[int] = (),
    suspects: tuple[Suspect, ...] = (),
    hang: Hang | None = None,
    slowness: Slowness | None = None,
) -> RoleInJob:
    """Records the decision; a later one for the same incident replaces it.

    `also_failed` are the nodes that failed by themselves, with or without the culprit; `suspects` those that may have
    begun it where none is known to have; `hang` the ranks that hang; `slowness` the slow
    rank for which it began.
    """
    incident = state.open_incident
    if incident is None:
        return state
    if incident.failure is not None and failure is None:
        # A request, or a node that became ready, while a failure is being repaired: the failure stays the title.
        text = shorten(f"{incident.action}; {words(actions)}")
        return _replace(state, incident.replace(action=text, actions=(*incident.actions, *actions)))
    same = incident.decided_at is not None and (incident.failure, incident.culprit) == (failure, culprit)
    also = {*also_failed, *incident.also_failed} - {culprit}
    return _replace(
        state,
        incident.replace(
            title=shorten(title),
            failure=failure,
            culprit=culprit,
            host=incident.host if same else _host(state, culprit),
            also_failed=tuple(sorted(also)),
            suspects=suspects,
            hang=hang,
            slowness=slowness,
            own_lines=incident.own_lines if incident.culprit == culprit else (),
            stopped=any(isinstance(action, Stop) for action in actions),
            decided_at=incident.decided_at if same else now,
            rule=rule,
            action=shorten(words(actions)),
            actions=actions,
            considered=considered,
            commanded_at=None,
            entered_at=None,
        ),
    )


def record_avoided_machines(state: RoleInJob, machines: tuple[str, ...]) -> RoleInJob:
    """Records that the requests for new nodes avoid these machines."""
    incident = state.open_incident
    if incident is None or not machines:
        return state
    return _replace(state, incident.replace(avoided=machines))


def waits(state: RoleInJob, text: str) -> RoleInJob:
    """Records why a node that is needed to continue is not available; the newest reason stays."""
    incident = state.open_incident
    return state if incident is None else _replace(state, incident.replace(waited_for=shorten(text)))


def record_world(state: RoleInJob) -> RoleInJob:
    """Records that the next world was sent out."""
    incident = state.open_incident
    if incident is None or state.world is None:
        return state
    return _replace(
        state,
        # Starts of ranks are counted per world, and this world may follow another that ended the same incident.
        incident.replace(generation_after=state.world.generation, nodes_after=state.world.nodes, starts=None),
    )


def record_commands(state: RoleInJob, time: datetime) -> RoleInJob:
    """Records that one more agent has the new world; the last one counts."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    return _replace(state, incident.replace(commanded_at=_later(incident.commanded_at, time)))


def record_entry(state: RoleInJob, time: datetime) -> RoleInJob:
    """Records that one more member's rendezvous returned; the last one counts."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    return _replace(state, incident.replace(entered_at=_later(incident.entered_at, time)))


def record_starts(state: RoleInJob, starts: RankStarts) -> RoleInJob:
    """Records how one more member's ranks were started, as its agent reports with the first steps."""
    incident = _of_current_world(state)
    if incident is None:
        return state
    known = incident.starts
    return _replace(state, incident.replace(starts=known + starts if known else starts))


def record_restore(state: RoleInJob, restored: Restore, *, generation: int, rank: int, time: datetime) -> RoleInJob:
    """Records the step with which a world continued, and the newer ones that its ranks distrust."""
    incident = next((known for known in reversed(state.own_incidents) if known.generation_after == generation), None)
    if incident is None:
        return state
    update: dict[str, object] = {
        "restored_step": restored.step,
        "restored_from": restored.source if restored.source is not RestoreSource.UNKNOWN else None,
        "steps_again": restored.again,
    }
    evidence: list[Evidence] = []
    if restored.distrusted:
        steps = ", ".join(f"{step:,}" for step in restored.distrusted)
        text = f"step {steps} in memory was not loaded again: the job had failed after each load of it"
        evidence.append(Evidence(time=time, source=EvidenceSource.AGENT, rank=rank, text=text))
    if found := memory_findings.describe(restored.memory, restored.source):
        # It is about no single node, and speaks against none.
        evidence.append(Evidence(time=time, source=EvidenceSource.AGENT, text=found))
    if evidence:
        update["evidence"] = (*incident.evidence, *evidence)[-KEPT_EVIDENCE:]
    return record_apart(_replace(state, incident.replace(**update)), restored, generation=generation, time=time)


def record_apart(state: RoleInJob, restored: Restore, *, generation: int, time: datetime) -> RoleInJob:
    """Records how the step of one state differs from that of others with which it was saved."""
    incident = next((known for known in reversed(state.own_incidents) if known.generation_after == generation), None)
    if incident is None or not restored.apart:
        return state
    # It speaks against no node.
    evidence = Evidence(time=time, source=EvidenceSource.AGENT, text=restored.apart)
    return _replace(state, incident.replace(evidence=(*incident.evidence, evidence)[-KEPT_EVIDENCE:]))


def record_verdict(state: RoleInJob, generation: int, found: Slowness, evidence: Evidence) -> RoleInJob:
    """Records the verdict of an experiment in the incident that led to its world."""
    incident = next((one for one in reversed(state.own_incidents) if one.generation_after == generation), None)
    if incident is None or incident.slowness is None:
        return state
    slowness = found.replace(step_after=incident.slowness.step_after)
    return _replace(
        state, incident.replace(slowness=slowness, evidence=(*incident.evidence, evidence)[-KEPT_EVIDENCE:])
    )


def record_step_after(state: RoleInJob, step: float) -> RoleInJob:
    """Records how long a step takes in the world that followed a repair of a slow rank, in seconds."""
    incident = _of_current_world(state)
    if incident is None or incident.slowness is None or incident.slowness.step_after is not None:
        return state
    return _replace(state, incident.replace(slowness=incident.slowness.replace(step_after=step)))


def restart_cost(state: RoleInJob, step: float) -> timedelta | None:
    """What the last interruption of the role has cost, with the steps that were made again; None where none is known.

    Args:
        state: The role.
        step: Seconds of a step.
    """
    for one in reversed(state.own_incidents):
        if one.stepping_at is not None and one.generation_after is not None and one.decided_at is not None:
            again = min(one.steps_again or 0, _MOST_STEPS) * step
            return one.stepping_at - one.decided_at + timedelta(seconds=min(again, _LONGEST_REWORK))
    return None


def follow_running(state: RoleInJob, now: datetime) -> RoleInJob:
    """Closes the incident that the current world ended once that world runs, and notes the first step whenever it
    comes."""
    incident = _of_current_world(state) or state.open_incident
    if incident is None or incident.stepping_at is not None or incident.closed_at is not None or not state.stepping:
        return state
    state = state.replace(lines=())
    if state.stepped:
        return _replace(state, incident.replace(stepping_at=now))
    if incident.running_at is not None:
        return state
    return _replace(state, incident.replace(running_at=incident.entered_at or now))


def caught_up(state: RoleInJob, now: datetime) -> RoleInJob:
    """Closes the open incident between two worlds: the failed command has caught up with the others, or has ended."""
    incident = state.open_incident
    return state if incident is None else _replace(state, incident.replace(running_at=now))


def abandon(state: RoleInJob, time: datetime, how: str) -> RoleInJob:
    """Closes the open incident, if any, because its repair is no longer desired."""
    incident = state.open_incident
    if incident is None:
        return state
    # Nothing else was decided.
    how_decided = {"decided_at": time, "rule": how, "action": shorten(how)} if incident.decided_at is None else {}
    return _replace(state, incident.replace(**how_decided, closed_at=time))


def give_up_role(state: RoleInJob, time: datetime) -> RoleInJob:
    """Closes the open incident, because the job continues without the role, which cannot be repaired."""
    incident = state.open_incident
    if incident is None:
        return state
    return _replace(state, incident.replace(action=f"give up the role {state.role}, and continue", closed_at=time))


def follow_with_another(state: RoleInJob, time: datetime) -> RoleInJob:
    """Closes the open incident, because the next failure, at `time`, is an incident of its own."""
    incident = state.open_incident
    if incident is None:
        return state
    at = max(incident.started_at, time)
    return _replace(state, incident.replace(closed_at=at, followed_by=state.incident_count + 1))


def explain_earlier_world(state: RoleInJob, failure: NodeFailure, *, generation: int) -> RoleInJob:
    """Takes in a report about a world that is over, which does not end the current one.

    It becomes evidence of the incident that ended that world, a node that failed by itself is named there, and ranks
    that report their own end are no suspects. All that is dropped where there is no such incident. Of a world that
    ended by request, as for one of another size, only nodes that failed by themselves are recorded.
    """
    evidence = failure.evidence
    own = failed_by_themselves([failure])
    for incident in reversed(state.own_incidents):
        ended_it = incident.failure is not None or (own and incident.observation is None)
        if incident.generation_before == generation and ended_it:
            update: dict[str, object] = {
                "also_failed": (*incident.also_failed, *sorted(own - {incident.culprit, *incident.also_failed})),
                "suspects": without(incident.suspects, failure.rank, failure.ranks),
            }
            if evidence not in incident.evidence and not incident.left_out:
                update["evidence"] = (*incident.evidence, evidence)[-KEPT_EVIDENCE:]
            return _replace(state, incident.replace(**update))
    return state


def record_failure_beside_request(state: RoleInJob, failure: NodeFailure, *, now: datetime) -> RoleInJob:
    """Records a node that failed by itself while the ranks of its world are about to be restarted by request."""
    own, incident = failed_by_themselves([failure]), state.open_incident
    if incident is None or not own:
        return state
    also_failed = (*incident.also_failed, *sorted(own - {incident.culprit, *incident.also_failed}))
    return add_evidence(_replace(state, incident.replace(also_failed=also_failed)), failure.evidence, now=now)


def record_own_lines(state: RoleInJob, incident: IncidentView, lines: tuple[str, ...]) -> RoleInJob:
    """Records what the culprit's node alone has printed."""
    if lines == incident.own_lines:
        return state
    return _replace(state, incident.replace(own_lines=lines))


def _host(state: RoleInJob, rank: int | None) -> str:
    node = state.nodes.get(rank) if rank is not None else None
    return node.host if node is not None else ""


def _of_current_world(state: RoleInJob) -> IncidentView | None:
    """The incident that the current world ended; an acknowledgement may come after the first steps."""
    incident = state.last_incident
    if state.world is None or incident is None:
        return None
    return incident if incident.generation_after == state.world.generation else None


def _later(known: datetime | None, time: datetime) -> datetime:
    return time if known is None else max(known, time)


def _replace(state: RoleInJob, incident: IncidentView) -> RoleInJob:
    """Replaces an incident by a newer version of it."""
    incidents = tuple(incident if one.number == incident.number else one for one in state.incidents)
    return state.replace(incidents=incidents)
