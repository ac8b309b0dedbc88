"""Has a checkpoint made before a change that is planned stops the ranks: in storage, and in the memory of other nodes.

What is in the memory of nodes is lost with them. So a job that stores checkpoints makes one before it is suspended,
before a node is replaced on request, before its world grows or shrinks while it trains, and before something is done
about a slow rank. The ranks train on until the checkpoint is durable. A state that is split over ranks is then saved
once more in memory: the ranks wait at a step until its copies are where they survive the change, with or without a
storage (`perdure.workflows.policy.checkpoints.holds`), and no step is lost. Where it would be, since a world of another
size cannot load it, the world does not change its size. Before a suspension the ranks wait at the step that is stored.

The same holds for a node that another party ends: a preemption, a drain, a SIGTERM. Its ranks train on until the job
releases it, for half of the grace period at most.

The change waits for `checkpoint.save_timeout` at most, and not at all where there is nothing to save: no steps were
made yet, the role serves others, the script saves nothing into the storage, a failure has stopped the world, or the
job ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from perdure.contract import Considered, Evidence, EvidenceSource, Incarnation, Observation
from perdure.contract.identity import identity_of
from perdure.contract.transitions import NodeEnding
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import commits, holds, other_size, state_loss
from perdure.workflows.policy.facts.agent_messages import CONTROL_LAG
from perdure.workflows.policy.facts.events import Event, RelaunchRequested, SuspendRequested
from perdure.workflows.policy.record import incidents, observed
from perdure.workflows.policy.state.checkpoint import HeldStep
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import PostponedChange

_LOOK_AGAIN = timedelta(minutes=10)
"""The time after which a change that was refused is looked at again."""
_MOST_OUTAGES = 3
"""Times that a wait begins again: workers that are always late must not keep a job from a change."""


def postpone(
    state: RoleInJob, request: SuspendRequested | RelaunchRequested, job: JobSpec, now: datetime
) -> RoleInJob | None:
    """Keeps a user's request until a checkpoint is durable; None where it is carried out at once."""
    replaces = isinstance(request, RelaunchRequested)
    # The nodes of a suspended job end, and all memory with them.
    waits = _begin(state, job, now, title=_title(request), leaves=replaces, keeps_memory=replaces)
    if waits is None or waits.postponed is None:
        return None
    if isinstance(request, RelaunchRequested):
        request = request.replace(incarnation=state.nodes[request.rank].incarnation)
    return waits.replace(postponed=waits.postponed.with_request(request))


def begin_again(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Begins a wait again where the job could not decide in time, as no worker was there.

    What the ranks have saved meanwhile may not be committed, and they have waited for their end in vain and trained on:
    all that would be lost. Where a failure has ended them, those of the next world do it. A node that another party
    ends is not there for as long.
    """
    before = state.postponed
    if before is None or before.endings or before.refused or state.behavior < Behavior.RELEASE_0_4:
        return state
    if before.generation != state.generation or before.begun_again >= _MOST_OUTAGES:
        return state
    if now - before.until <= CONTROL_LAG and not _have_trained_on(state, before, now):
        return state
    if before.requested and _is_stopped(state):
        # `follow_world` has the ranks of the next world wait.
        patience = job.stored.save_timeout if before.stores and job.stored is not None else holds.WITHIN
        return state.replace(postponed=before.replace(until=now + patience, begun_again=before.begun_again + 1))
    waits = _begin(
        state.replace(postponed=None),
        job,
        now,
        title=before.title,
        resizes=before.resizes,
        leaves=before.leaves,
        keeps_memory=before.suspend is None,
    )
    if waits is None or waits.postponed is None:
        return state
    requests = {"suspend": before.suspend, "relaunches": before.relaunches, "slow_rank": before.slow_rank}
    return waits.replace(postponed=waits.postponed.replace(**requests, begun_again=before.begun_again + 1))


def _have_trained_on(state: RoleInJob, postponed: PostponedChange, now: datetime) -> bool:
    """Whether the ranks have waited for a change, and do not any more."""
    held = _held(state, postponed)
    return held is not None and not held.problem and holds.have_trained_on(held, now)


def _held(state: RoleInJob, postponed: PostponedChange) -> HeldStep | None:
    """The ranks' answer to the request to wait, if there was one."""
    if postponed.hold:
        return holds.answer(state, postponed.hold)
    return holds.answer_stored(state, postponed.checkpoint_request) if postponed.stores else None


def follow_world(state: RoleInJob, now: datetime) -> RoleInJob:
    """Has the ranks of a world that follows a failure wait for what is requested as those before them were to: what
    they make beyond what is stored or copied would be lost."""
    postponed = state.postponed
    if postponed is None or postponed.generation == state.generation or state.behavior < Behavior.RELEASE_0_4:
        return state
    relaunched = any(_is_member(state, one.rank, one.incarnation) for one in postponed.relaunches)
    ending = any(_is_member(state, one.rank, one.incarnation) for one in postponed.endings)
    if postponed.suspend is None and not relaunched and not ending:
        # The nodes that were to be replaced or to end are gone already.
        return state
    within = max(postponed.until - now, timedelta())
    state = holds.follow_world(state, checkpoint_request=postponed.checkpoint_request, within=within)
    return state.replace(postponed=postponed.replace(generation=state.generation, hold=0))


def _is_member(state: RoleInJob, rank: int, incarnation: int | None) -> bool:
    node = state.nodes.get(rank)
    return node is not None and node.incarnation == incarnation and state.is_member(node)


def end_node(state: RoleInJob, event: Event, job: JobSpec, now: datetime) -> RoleInJob:
    """Has a checkpoint made before a node ends that another party ends, or releases the node at once."""
    if not isinstance(event, NodeEnding):
        return state
    node = state.nodes.get(event.rank)
    if node is None or node.incarnation != event.incarnation or not node.alive or node.released:
        return state
    title = f"node {node.rank} ends, as {event.detail}"
    waits = _begin(state, job, now, title=title, leaves=True) if state.is_member(node) else None
    if waits is None or waits.postponed is None:
        return state.with_node(node.replace(released=True))
    ending = Incarnation(**identity_of(event))
    others = (one for one in waits.postponed.endings if one.key != ending.key)
    return waits.replace(postponed=waits.postponed.replace(endings=(*others, ending)))


def release_nodes(state: RoleInJob, endings: Iterable[Incarnation]) -> RoleInJob:
    """Lets nodes end that have waited for a checkpoint."""
    for ending in endings:
        node = state.nodes.get(ending.rank)
        if node is not None and node.incarnation == ending.incarnation and node.alive:
            state = state.with_node(node.replace(released=True))
    return state


def advance(state: RoleInJob, now: datetime) -> RoleInJob:
    """Has the ranks wait at a step, once the checkpoint in storage is durable or too late."""
    postponed = state.postponed
    if postponed is None or not postponed.holds or postponed.hold or postponed.generation != state.generation:
        return state
    if not _trains(state) or (now < postponed.until and state.checkpoints.answered < postponed.checkpoint_request):
        return state
    return _request_hold(state, postponed, now)


def hold_world(state: RoleInJob, job: JobSpec, now: datetime, *, size: int) -> RoleInJob | None:
    """The state while the next world, of `size` nodes, waits for a checkpoint of the current one, or is not formed as
    the state would be lost; None where it is formed now."""
    postponed, world = state.postponed, state.world
    if postponed is not None and postponed.generation != state.generation and postponed.refused:
        state, postponed = state.replace(postponed=None), None
    if postponed is not None and postponed.refused:
        if now < postponed.until:
            return state
        state, postponed = state.replace(postponed=None), None
    if postponed is not None and is_due(state, now) and postponed.generation == state.generation:
        held = holds.answer(state, postponed.hold) if postponed.hold else None
        if held is None or not held.problem or state_loss.accepts_older(state, job):
            return None
        return _refuse(state, postponed.title, held.problem, now)
    leaves = world is not None and (size < world.nodes or max(world.members) >= state.nodes_max)
    verb = "shrinks" if leaves else "grows"
    title = "the next world is formed" if world is None else f"the world {verb} from {world.nodes:,} to {size:,} nodes"
    if world is not None and (why := holds.obstacle(state, job, leaves=leaves)):
        return _refuse(state, title, why, now)
    return _begin(state, job, now, title=title, resizes=world is not None and size != world.nodes, leaves=leaves)


def why_refused(state: RoleInJob, job: JobSpec, *, largest: int) -> str:
    """Why the role cannot have at most `largest` nodes without losing its state; empty where it can, as far as that is
    known before its ranks wait at a step."""
    world = state.world
    if world is None or not _trains(state) or largest >= world.nodes:
        return ""
    if state_loss.accepts_older(state, job):
        return ""
    postponed = state.postponed
    found = postponed.refused if postponed is not None and postponed.generation == state.generation else ""
    return other_size.why_needed(state) or holds.obstacle(state, job, leaves=True) or found


def forget_world(state: RoleInJob) -> RoleInJob:
    """No other world is due any more."""
    postponed = state.postponed
    forgotten = postponed is not None and not postponed.requested and not postponed.slow_rank
    return holds.withdraw(state).replace(postponed=None) if forgotten else state


def forget_refusal(state: RoleInJob) -> RoleInJob:
    """Another number of nodes is requested."""
    return state.replace(postponed=None) if state.postponed is not None and state.postponed.refused else state


def hold_slow_rank(state: RoleInJob, job: JobSpec, now: datetime, *, title: str, leaves: bool) -> RoleInJob | None:
    """The state while a repair of a slow rank waits for a checkpoint; None where it does not."""
    postponed = state.postponed
    if postponed is not None and is_due(state, now) and postponed.generation == state.generation:
        return None
    waits = _begin(state, job, now, title=title, leaves=leaves)
    if waits is None or waits.postponed is None:
        return None
    return waits.replace(postponed=waits.postponed.replace(slow_rank=True))


def forget_slow_rank(state: RoleInJob) -> RoleInJob:
    """Nothing is to be done about a slow rank any more."""
    postponed = state.postponed
    if postponed is None or not postponed.slow_rank:
        return state
    if postponed.requested:
        return state.replace(postponed=postponed.replace(slow_rank=False))
    return holds.withdraw(state).replace(postponed=None)


def withdraw_suspension(state: RoleInJob) -> RoleInJob:
    """The job is to be resumed before it was suspended."""
    state, postponed = holds.withdraw(state), state.postponed
    if postponed is None or not (postponed.relaunches or postponed.endings):
        return state.replace(postponed=None)
    return state.replace(postponed=postponed.replace(suspend=None))


def is_due(state: RoleInJob, now: datetime) -> bool:
    """Whether nothing is waited for any longer: the checkpoint is durable, it is too late for it, or its world is
    gone."""
    postponed = state.postponed
    if postponed is None:
        return False
    over = now >= postponed.until or state.outcome is not None or not any(node.alive for node in state.members)
    durable = state.checkpoints.answered >= postponed.checkpoint_request
    held = not postponed.holds or (postponed.hold > 0 and holds.answer(state, postponed.hold) is not None)
    return over or (durable and held)


def settle(state: RoleInJob, now: datetime) -> RoleInJob:
    """Ends the wait; the open incident, which the change has begun, shows the result."""
    postponed = state.postponed
    if postponed is None:
        return state
    state = state.replace(postponed=None)
    if state.open_incident is None or postponed.refused:
        return state
    for text in filter(None, (_outcome(state, postponed, now), _outcome_of_hold(state, postponed, now))):
        state = incidents.add_evidence(state, Evidence(time=now, source=EvidenceSource.AGENT, text=text), now=now)
    return state


def describe(state: RoleInJob) -> str:
    """What the job waits for, for people; empty where no change waits."""
    postponed = state.postponed
    if postponed is None or not (postponed.requested or postponed.generation == state.generation):
        return ""
    if postponed.refused:
        return f"{refusal(state)}; looked at again at {postponed.until:%H:%M:%S} UTC"
    if postponed.hold:
        until = f"{postponed.until:%H:%M:%S} UTC"
        return f"the ranks wait at one of the next steps, then {postponed.title}, at {until} at the latest"
    return f"a checkpoint, then {postponed.title}, at {postponed.until:%H:%M:%S} UTC at the latest"


def refusal(state: RoleInJob) -> str:
    """Which change is not made, and why; empty where none is refused."""
    postponed = state.postponed
    if postponed is None or not postponed.refused or postponed.generation != state.generation:
        return ""
    remedy = f"`perdure scale {state.name} N --older` does it nevertheless"
    return f"{postponed.title}: not done, since the state would be lost: {postponed.refused}; {remedy}"


_WHY_REFUSED = Considered(
    option="make the change", why_not="steps would be lost; `perdure scale` with --older does it nevertheless"
)


def _refuse(state: RoleInJob, title: str, why: str, now: datetime) -> RoleInJob:
    """The world stays as it is, and the refusal is looked at again some time later."""
    before = observed.begun(state, lambda one: one.refused_change)
    if before is None or before.title != f"{title}: not done":
        evidence = Evidence(time=now, source=EvidenceSource.AGENT, text=f"the state would be lost: {why}")
        entry = observed.new_entry(
            state,
            Observation(refused_change=True),
            f"{title}: not done",
            at=now,
            now=now,
            evidence=(evidence,),
            considered=(_WHY_REFUSED,),
        )
        state = observed.put(state, entry)
    refused = PostponedChange(
        title=title,
        checkpoint_request=state.checkpoints.answered,
        since=now,
        until=now + _LOOK_AGAIN,
        generation=state.generation,
        refused=why,
    )
    return holds.withdraw(state).replace(postponed=refused)


def _trains(state: RoleInJob) -> bool:
    """Whether the ranks of a world train, and nothing has stopped them."""
    if state_loss.awaits(state):
        # They make no steps, and no checkpoint.
        return False
    return state.stepping and state.interruption is None and not state.between_stages and state.outcome is None


def _is_stopped(state: RoleInJob) -> bool:
    """Whether a world was stopped, and another one is to train on."""
    over = state.world is None or state.between_stages or state.outcome is not None or state_loss.awaits(state)
    return not over and not _trains(state)


def _request_hold(state: RoleInJob, postponed: PostponedChange, now: datetime) -> RoleInJob:
    state = holds.request(state, resizes=postponed.resizes, leaves=postponed.leaves)
    number = state.checkpoints.hold.number if state.checkpoints.hold is not None else 0
    return state.replace(postponed=postponed.replace(hold=number, until=now + holds.WITHIN))


def _with_copies(state: RoleInJob, postponed: PostponedChange, now: datetime) -> RoleInJob:
    """Another change waits, too, for which a node leaves: the ranks wait for the copies then."""
    if postponed.leaves or not postponed.holds:
        return state
    postponed = postponed.replace(leaves=True)
    return _request_hold(state, postponed, now) if postponed.hold else state.replace(postponed=postponed)


def _begin(
    state: RoleInJob,
    job: JobSpec,
    now: datetime,
    *,
    title: str,
    resizes: bool = False,
    leaves: bool = False,
    keeps_memory: bool = True,
) -> RoleInJob | None:
    """Requests a checkpoint, unless one is requested already; None where none is worth waiting for."""
    before = state.postponed if state.postponed is None or not state.postponed.refused else None
    supersedes = not keeps_memory and state.behavior >= Behavior.RELEASE_0_4
    if before is not None and (before.suspend is not None or not (supersedes or is_due(state, now))):
        return _with_copies(state, before, now) if leaves else state
    if not _trains(state) or job.roles[state.role].ready is not None:
        return None
    timeout = job.stored.save_timeout if job.stored is not None and not commits.saves_nothing(state) else timedelta()
    held = keeps_memory and holds.is_worthwhile(state)
    if not timeout and not held:
        return None
    if timeout:
        state = commits.request(state)
    before = before if state.behavior >= Behavior.RELEASE_0_4 else None
    postponed = PostponedChange(
        title=title,
        checkpoint_request=state.checkpoints.requests if timeout else state.checkpoints.answered,
        stores=bool(timeout),
        since=now,
        until=now + timeout,
        generation=state.generation,
        # These are due, and not carried out yet: their checkpoint was reported together with what this one is for.
        relaunches=before.relaunches if before is not None else (),
        endings=before.endings if before is not None else (),
        holds=held,
        resizes=resizes,
        leaves=leaves,
    )
    if not timeout:
        return _request_hold(state, postponed, now)
    if not keeps_memory:
        # No step that is made after the checkpoint is kept.
        state = holds.request_stored(state, within=timeout)
    return state.replace(postponed=postponed)


def _title(request: SuspendRequested | RelaunchRequested) -> str:
    if isinstance(request, SuspendRequested):
        return f"{f'the role {request.role}' if request.role else 'the job'} is suspended"
    return f"node {request.rank} is replaced"


_TRAINED_ON = "had trained on when the change was made: steps after it may be made again"


def _outcome_of_hold(state: RoleInJob, postponed: PostponedChange, now: datetime) -> str:
    if not postponed.hold:
        return ""
    held = holds.answer(state, postponed.hold)
    if held is None:
        return "the ranks did not wait at a step in time: the steps since the last copies are made again"
    if held.problem:
        return f"the state could not be kept in memory, and the change was made nevertheless: {held.problem}"
    if holds.have_trained_on(held, now):
        return f"all ranks waited at step {held.step:,}, and {_TRAINED_ON}"
    return f"all ranks waited at step {held.step:,} until it was safe in memory: no step is lost"


def _outcome(state: RoleInJob, postponed: PostponedChange, now: datetime) -> str:
    if not postponed.stores:
        return ""
    durable, waited = state.checkpoints.durable, f"requested at {postponed.since:%H:%M:%S} UTC before this change"
    if durable is not None and state.checkpoints.answered >= postponed.checkpoint_request:
        held = holds.answer_stored(state, postponed.checkpoint_request)
        end = "" if held is None else ": all ranks waited at it, and no step is lost"
        if held is not None and holds.have_trained_on(held, now):
            end = f": all ranks waited at it, and {_TRAINED_ON}"
        return f"the checkpoint of step {durable.checkpoint.step:,}, {waited}, is durable{end}"
    why = state.checkpoints.problem or _of_others_late(state, postponed) or "the ranks reported none"
    return f"the checkpoint {waited} was not durable in time, and the change did not wait longer: {why}"


def _of_others_late(state: RoleInJob, postponed: PostponedChange) -> str:
    """What is durable, and whose part is not, where the script has several checkpointers; empty where none is."""
    known = state.checkpoints
    if known.durable is None or known.durable.committed_at < postponed.since:
        return ""
    late = sorted(place for place, answered in known.answers_of.items() if answered < postponed.checkpoint_request)
    if not late:
        return ""
    step = known.durable.checkpoint.step
    return (
        f"step {step:,} is durable, and the script's other checkpointers, such as {late[0]!r}, have stored none since"
    )
