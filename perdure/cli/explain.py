"""`perdure explain`: the cause of an interruption, the actions taken, and the options not taken."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from perdure.cli import text
from perdure.cli.terminal import printed_lines
from perdure.contract.incidents import SlowCause
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES

if TYPE_CHECKING:
    from perdure.contract import IncidentView, JobPhase, Suspect

_NAMED = 8


def with_role_named(incident: IncidentView) -> IncidentView:
    """Returns an incident of a job of several roles with its role in the title."""
    return incident.replace(title=f"{incident.role}: {incident.title}")


def explanation(
    incident: IncidentView, *, job: str, flag: str, ended: JobPhase | None = None, several_roles: bool = False
) -> Text:
    """Renders the whole story of one incident.

    Args:
        incident: The job's record.
        job: The job's name, for the suggested commands.
        flag: The option with which these commands find its namespace.
        ended: How the job has ended; None while it has not.
        several_roles: Whether the suggested commands must name the role of a node.
    """
    of_role = f" --role {incident.role}" if several_roles else ""
    lines = [_title(incident)]
    for label, words in (
        ("SAW", [f"{text.clock(e.time, fraction=True)} {e.text}{_who(e.source, e.rank)}" for e in incident.evidence]),
        ("ONLY", [f"node {incident.culprit} printed: {line}" for line in reversed(incident.own_lines)]),
        ("MEANS", [_meaning(incident)]),
        ("DID", [_decision(incident)]),
        ("NOT", [f"{option.option}: {option.why_not}" for option in incident.considered]),
        ("WAIT", [incident.waited_for]),
        ("TOOK", [_course(incident)]),
        ("STEP", [_restore(incident), _pace(incident)]),
        ("YOU", [_advice(incident, job=job, flag=flag, ended=ended, of_role=of_role)]),
    ):
        for index, word in enumerate(filter(None, words)):
            lines.append(Text.assemble((f"{label if index == 0 else '':<6}", "bold"), word))
    if incident.left_out:
        lines.append(Text(f"      {incident.left_out}", style="dim"))
    if incident.log_tail:
        lines.append(Text("LOG", style="bold"))
        lines.extend(Text(f"      {line}", style="dim") for line in printed_lines(incident.log_tail)[-12:])
    return Text("\n").join(lines)


def _title(incident: IncidentView) -> Text:
    over = incident.over_at
    end = f" -> {text.clock(over)}" if over else ""
    costs = incident.observation is None or bool(incident.observation.stalled)
    cost = f"    cost {text.duration(over - incident.started_at)}" if over and costs else ""
    if incident.followed_by:
        cost += f" until #{incident.followed_by} began"
    return Text.assemble(
        (f"#{incident.number} {incident.title}", "bold"), f"    {text.clock(incident.started_at)}{end}{cost}"
    )


def _who(source: str, rank: int | None) -> str:
    return f" ({source.lower()}{'' if rank is None else f' of node {rank}'})"


def _meaning(incident: IncidentView) -> str:
    sources = {evidence.source for evidence in incident.evidence}
    if incident.observation and incident.observation.storage:
        return "nothing was interrupted; the loss of all nodes would have cost the steps since the newest checkpoint"
    if incident.observation and incident.observation.uncreated:
        return "nothing was interrupted: the world trains without it"
    if incident.observation and incident.observation.shared:
        return "nothing failed: jobs of the cluster share its nodes, which go where they add most"
    if incident.observation and incident.observation.new_goal:
        return "nothing was interrupted"
    if incident.observation and incident.observation.missed_goal:
        return "nothing was interrupted; it is said as soon as it is known"
    if incident.observation and incident.observation.missed_nodes:
        return "nothing was interrupted: the world trains with the nodes that it has"
    if incident.observation and incident.observation.smaller_requests:
        return "nothing failed: no machine has room for what nodes requested"
    if incident.observation and incident.observation.started_over:
        return "the training began at its first step, beside checkpoints that are damaged"
    if incident.observation and incident.observation.awaits_state:
        return "a newer state than the ranks can load existed, and may come back: no step is thrown away meanwhile"
    if incident.observation and incident.observation.lost_state:
        return "steps that were made are made again"
    if incident.observation and incident.observation.refused_change:
        return "nothing was interrupted: the ranks found that a world of that size could not load what they have"
    if incident.observation and incident.observation.suspected:
        return "nothing was interrupted: the machine was checked beside a restart, after a failure that may be its own"
    if incident.observation and incident.observation.failed_check:
        return "nothing was interrupted: the machine was checked before the node was taken into a world"
    if incident.observation and incident.observation.bad_number:
        return "nothing was interrupted; what is computed from such a number is none, either"
    if incident.observation and incident.observation.unrepaired:
        return "nothing was interrupted; what is computed from it is wrong, too"
    if incident.observation and incident.observation.not_deterministic:
        return "nothing was interrupted; a step that differs with itself says nothing about devices"
    if incident.observation and incident.observation.stragglers:
        return "nothing was interrupted; all ranks step as often as the slowest one"
    if incident.observation:
        return "no rank failed, and nothing was interrupted" + (
            "; ranks that wait for others over an interrupted network step again when it is back"
            if incident.observation.unreachable and incident.observation.stalled
            else ""
        )
    if incident.failure is None and incident.decided_at is None:
        return "no verdict yet"
    if incident.failure is None:
        by_user = "USER" in sources
        why = "requested by a user" if by_user else "the available nodes changed"
        return f"{'' if by_user or incident.also_failed else 'nothing failed: '}{why}{_also_failed(incident)}"
    culprit = "" if incident.culprit is None else f"; culprit: node {incident.culprit}"
    culprit += _also_failed(incident)
    return f"{FAILURE_CLASSES[incident.failure].meaning}{culprit}{_suspicion(incident)}; {_confidence(incident)}"


def _also_failed(incident: IncidentView) -> str:
    several = "s" if len(incident.also_failed) > 1 else ""
    nodes = ", ".join(map(str, incident.also_failed))
    return f"; also failed: node{several} {nodes}" if nodes else ""


def _suspicion(incident: IncidentView) -> str:
    return "".join(f"; suspected: {_suspect(one)}" for one in incident.suspects)


def _suspect(suspect: Suspect) -> str:
    ranks = ", ".join(map(str, suspect.ranks[:_NAMED])) + (" and more" if len(suspect.ranks) > _NAMED else "")
    several = "s" if len(suspect.ranks) > 1 else ""
    signs = [f"rank{several} {ranks} reported no timeout of {'their' if several else 'its'} own"] if ranks else []
    signs += ["it stopped stepping before the others"] if suspect.stalled_first else []
    return f"node {suspect.rank}" + (f" ({', '.join(signs)})" if signs else "")


def _confidence(incident: IncidentView) -> str:
    """How sure the verdict is. Only reports about the culprit itself, from several sources, make it sure."""
    if incident.hang is not None:
        return f"high confidence: {text.count(len(incident.hang.signs), 'independent sign')} agree"
    if incident.culprit is None:
        # Those that report are the ones that waited: however many they are, they do not know for whom.
        independent = any(one.stalled_first and one.ranks for one in incident.suspects)
        return "fair confidence: two signs agree" if independent else "low confidence: no node reported the cause"
    evidence = [one for one in incident.evidence if one.rank == incident.culprit or one.source == "PEERS"]
    sources = {one.source for one in evidence}
    basis = f"{text.count(len(evidence), 'piece')} of evidence from {text.count(len(sources), 'source')}"
    return f"{'high' if len(sources) > 1 else 'fair'} confidence: {basis}"


def _decision(incident: IncidentView) -> str:
    if incident.observation and incident.observation.uncreated:
        return "request it again, with growing pauses"
    if incident.observation and incident.observation.shared:
        return "follow the advice; a world that trains changes after a checkpoint, where the job stores some"
    if incident.observation and incident.observation.new_goal:
        return "choose the number of nodes by it from now on, with the speeds that were measured before"
    if incident.observation and incident.observation.missed_goal:
        return "choose the number of nodes that comes nearest to it, where one does"
    if incident.observation and incident.observation.missed_nodes:
        return "give them up for now, and choose among the numbers of nodes that there are"
    if incident.observation and incident.observation.smaller_requests:
        return "request these nodes again, with no less than scaling.relax and their use allow"
    if incident.observation and incident.observation.started_over:
        return "start over, and delete none of these checkpoints"
    if incident.observation and incident.observation.awaits_state:
        return "keep the nodes, and look for the state again each second"
    if incident.observation and incident.observation.lost_state:
        return "continue with what was there, and delete none of the checkpoints that were not loaded"
    if incident.observation and incident.observation.refused_change:
        return "keep the world as it is, and find out again ten minutes later, as long as the change is due"
    if incident.observation and incident.observation.suspected:
        return "keep the node; new nodes avoid its machine, where the backend chooses machines"
    if incident.observation and incident.observation.failed_check:
        refused = incident.observation.refused
        return "replace the node, on another machine if one has room" if refused else "take the node in"
    if incident.observation and incident.observation.bad_number:
        return "nothing: the training continued with it"
    if incident.observation and incident.observation.unrepaired:
        return "nothing: a user had paused repairs"
    if incident.observation and incident.observation.not_deterministic:
        return "nothing: the training continued, and its steps are not replayed"
    if incident.slowness is not None and incident.slowness.cause is SlowCause.NEITHER and incident.observation:
        return "nothing more: the nodes keep their places"
    if incident.observation and incident.observation.stragglers:
        return "nothing: the training continues at the pace of that rank"
    if incident.observation:
        return "the agents tried again" if incident.observation.storage else "nothing: it ended by itself"
    if incident.decided_at is None:
        return "nothing yet"
    rule = f"rule {incident.rule}: " if incident.rule else ""
    generation = ""
    if incident.generation_after:
        generation = f"; generation {incident.generation_after} with {text.count(incident.nodes_after or 0, 'node')}"
        generation += f" (before: {incident.nodes_before})" if incident.nodes_after != incident.nodes_before else ""
    away = f"; new nodes avoid {', '.join(incident.avoided)} if they can" if incident.avoided else ""
    return f"{rule}{incident.action}{generation}{away}"


def _course(incident: IncidentView) -> str:
    """The phases of the interruption, with their durations."""
    if incident.observation:
        return ""
    marks = [
        ("noticed after", incident.noticed_at),
        ("decided in", incident.decided_at),
        ("commanded in", incident.commanded_at),
        ("rendezvous in", incident.entered_at),
        ("first step in", incident.stepping_at),
        # Between two torchruns only a command was restarted.
        ("caught up with the others in", incident.running_at if not incident.generation_after else None),
        # Abandoned, or followed by the next incident, before the new world ran.
        ("given up after", incident.closed_at if not incident.followed_by else None),
    ]
    parts: list[str] = []
    previous = incident.started_at
    for words, mark in marks:
        if mark is not None:
            parts.append(f"{words} {text.duration(max(0.0, (mark - previous).total_seconds()))}")
            previous = max(previous, mark)
    if incident.followed_by:
        parts.append(f"did not run again before #{incident.followed_by} began")
    elif incident.running_at and not incident.stepping_at and incident.generation_after:
        parts.append("its ranks run, and no step was seen yet")
    return ", ".join(parts) + _starts(incident)


def _restore(incident: IncidentView) -> str:
    """Names the step with which the new world continued, where a checkpointer reported it."""
    if incident.restored_step is None:
        return ""
    return text.describe_restore(incident.restored_step, incident.restored_from, incident.steps_again)


def _pace(incident: IncidentView) -> str:
    """Says what was gained by what was done about a slow rank."""
    slowness = incident.slowness
    if slowness is None or slowness.step_after is None or incident.observation:
        return ""
    return f"a step took {text.duration(slowness.step_before)} before, and {text.duration(slowness.step_after)} after"


def _starts(incident: IncidentView) -> str:
    """Describes warm and cold starts of ranks, with the reasons for cold ones."""
    starts = incident.starts
    if starts is None:
        return ""
    said = f"; {text.count(starts.warm, 'rank')} started warm" if starts.warm else ""
    if starts.standbys:
        said += f" ({starts.standbys} from standbys: {starts.standby_reason})"
    if starts.cold:
        said += f"{', ' if said else '; '}{text.count(starts.cold, 'rank')} started cold: {starts.reason}"
    return said


def _advice(incident: IncidentView, *, job: str, flag: str, ended: JobPhase | None, of_role: str) -> str:
    if incident.observation and incident.observation.uncreated and incident.closed_at is None and ended is None:
        return "change what refuses it, which the text above names: docs/kubernetes.md, What the job learns"
    if incident.observation and incident.observation.started_over:
        return "remove these checkpoints once no one needs them: this job does not"
    if incident.observation and incident.observation.awaits_state and incident.closed_at is None and ended is None:
        return (
            "mount the storage, or bring the node back, which the text above names; or "
            f"perdure restart {job} --older{of_role}{flag} continues with the older state: docs/checkpoints.md"
        )
    if incident.observation and incident.observation.lost_state:
        return (
            "if the newer state is still somewhere: cancel the job, and submit it again with that storage, where its "
            "newest checkpoint is loaded: docs/checkpoints.md"
        )
    if incident.observation and incident.observation.refused_change:
        return (
            f"perdure scale {job} N --older{of_role}{flag} does it nevertheless: the ranks continue with an older "
            "state, or begin anew: docs/checkpoints.md"
        )
    if incident.observation and incident.observation.failed_check:
        return f"have that machine looked at; perdure check {job}{flag} shows the others: docs/checks.md"
    if incident.observation and incident.observation.bad_number:
        return "recovery.on_nan in the job's file has a job go back by itself, or stop: docs/numbers.md"
    if incident.observation and incident.observation.unrepaired:
        return f"look at it; perdure resume-repairs {job}{flag} has the job repair what comes next: docs/hangs.md"
    if incident.observation and incident.observation.not_deterministic:
        return "torch.use_deterministic_algorithms(True) in the script: docs/corruption.md"
    if ended is not None and (incident.failure is None or not incident.stopped):
        return f"nothing to do: the job has ended since ({ended.lower()}); perdure status {job}{flag}"
    if incident.slowness is not None and incident.slowness.cause is SlowCause.PLACE:
        return "give all ranks equal work, or train on: docs/stragglers.md"
    if incident.observation and incident.observation.stragglers:
        slow = incident.observation.stragglers[0].node
        return (
            "if its data are like the others', move it to another machine: "
            f"perdure restart {job} --node {slow}{of_role}{flag}"
        )
    if incident.failure is None:
        return f"nothing to do; perdure status {job}{flag}"
    named = incident.culprit if incident.culprit is not None else next((s.rank for s in incident.suspects), None)
    node = "" if named is None else f" --node {named}{of_role}"
    traits = FAILURE_CLASSES[incident.failure]
    return (traits.remedy if incident.stopped else traits.advice).format(job=job, flag=flag, node=node)


def table_line(incident: IncidentView) -> str:
    """One incident as a line of the list."""
    when = incident.started_at.astimezone()
    today = when.date() == datetime.now(UTC).astimezone().date()
    stamp = f"{when:%H:%M:%S}" if today else f"{when:%Y-%m-%d %H:%M:%S}"
    return f"{stamp}  {text.incident_line(incident)}"
