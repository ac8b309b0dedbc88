"""`perdure explain`: why an interruption happened, what was done about it, and what was not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from perdure.cli import text

if TYPE_CHECKING:
    from workflows.messages import IncidentView

MEANINGS = {
    "USER_CODE": "the script failed by itself; the same will probably happen again",
    "CRASH": "a rank crashed in native code",
    "KILLED": "a rank was killed from outside",
    "OUT_OF_MEMORY": "memory ran out",
    "PEER_LOST": "ranks failed because another one went away",
    "LAUNCH": "the command could not be started",
    "COMMAND_LOST": "the command died under healthy ranks",
    "UNPROTECTED": "ranks ran without Perdure's rendezvous",
    "NODE_LOST": "the node was lost (infrastructure)",
    "NODE_UNRESPONSIVE": "the node answered nothing while its world stood still (infrastructure)",
    "CREATE_FAILED": "the node could not be created",
    "RENDEZVOUS_TIMEOUT": "a node did not enter the world in time",
}


def explanation(incident: IncidentView, *, job: str, flag: str) -> Text:
    """The whole story of one incident.

    Args:
        incident: What the job wrote down.
        job: Its name, for the suggested commands.
        flag: What these need to find its namespace.
    """
    lines = [_title(incident)]
    for label, words in (
        ("SAW", [f"{text.clock(e.time, fraction=True)} {e.text}{_who(e.source, e.rank)}" for e in incident.evidence]),
        ("MEANS", [_meaning(incident)]),
        ("DID", [_deed(incident)]),
        ("NOT", [f"{option.option}: {option.why_not}" for option in incident.considered]),
        ("WAIT", [incident.waited_for]),
        ("TOOK", [_course(incident)]),
        ("YOU", [_advice(incident, job=job, flag=flag)]),
    ):
        for index, word in enumerate(filter(None, words)):
            lines.append(Text.assemble((f"{label if index == 0 else '':<6}", "bold"), word))
    if incident.log_tail:
        lines.append(Text("LOG", style="bold"))
        lines.extend(Text(f"      {line}", style="dim") for line in incident.log_tail.splitlines()[-12:])
    return Text("\n").join(lines)


def _title(incident: IncidentView) -> Text:
    end = f" -> {text.clock(incident.stepping_at)}" if incident.stepping_at else ""
    cost = f"    cost {text.duration(incident.stepping_at - incident.started_at)}" if incident.stepping_at else ""
    return Text.assemble(
        (f"#{incident.number} {incident.title}", "bold"), f"    {text.clock(incident.started_at)}{end}{cost}"
    )


def _who(source: str, rank: int | None) -> str:
    return f" ({source.lower()}{'' if rank is None else f' of node {rank}'})"


def _meaning(incident: IncidentView) -> str:
    sources = {evidence.source for evidence in incident.evidence}
    if incident.failure is None and incident.decided_at is None:
        return "not judged yet"
    if incident.failure is None:
        asked = "USER" in sources
        return "asked for by a user" if asked else "nothing failed: the nodes at hand changed"
    confidence = "high" if len(sources) > 1 else "fair"
    culprit = "" if incident.culprit is None else f"; culprit: node {incident.culprit}"
    signs = f"{text.count(len(incident.evidence), 'sign')} from {text.count(len(sources), 'source')}"
    return f"{MEANINGS[incident.failure]}{culprit}; {confidence} confidence: {signs}"


def _deed(incident: IncidentView) -> str:
    if incident.decided_at is None:
        return "nothing yet"
    rule = f"rule {incident.rule}: " if incident.rule else ""
    generation = ""
    if incident.generation_after:
        generation = f"; generation {incident.generation_after} with {text.count(incident.nodes_after or 0, 'node')}"
        generation += f" (before: {incident.nodes_before})" if incident.nodes_after != incident.nodes_before else ""
    away = f"; new nodes keep away from {', '.join(incident.avoided)} if they can" if incident.avoided else ""
    return f"{rule}{incident.action}{generation}{away}"


def _course(incident: IncidentView) -> str:
    """Where the time went."""
    marks = [
        ("noticed after", incident.noticed_at),
        ("decided in", incident.decided_at),
        ("commanded in", incident.commanded_at),
        ("rendezvous in", incident.entered_at),
        ("first step in", incident.stepping_at),
    ]
    parts: list[str] = []
    previous = incident.started_at
    for words, mark in marks:
        if mark is not None:
            parts.append(f"{words} {text.duration(max(0.0, (mark - previous).total_seconds()))}")
            previous = max(previous, mark)
    return ", ".join(parts) + _starts(incident)


def _starts(incident: IncidentView) -> str:
    """Whether ranks had to import everything anew, and why."""
    starts = incident.starts
    if starts is None:
        return ""
    said = f"; {text.count(starts.warm, 'rank')} started warm" if starts.warm else ""
    if starts.standbys:
        said += f" ({starts.standbys} from standbys: {starts.standby_reason})"
    if starts.cold:
        said += f"{', ' if said else '; '}{text.count(starts.cold, 'rank')} started cold: {starts.reason}"
    return said


def _advice(incident: IncidentView, *, job: str, flag: str) -> str:
    match incident.failure:
        case "USER_CODE" | "CRASH" | "LAUNCH" | "OUT_OF_MEMORY" | "COMMAND_LOST" | "UNPROTECTED":
            node = "" if incident.culprit is None else f" --node {incident.culprit}"
            return f"perdure logs {job}{flag}{node} --tail 50"
        case None:
            return f"nothing to do; perdure status {job}{flag}"
        case _:
            return f"nothing to do, unless it repeats; perdure nodes {job}{flag}"


def table_line(incident: IncidentView) -> str:
    """One incident in the list of all."""
    when = incident.started_at.astimezone()
    today = when.date() == datetime.now(UTC).astimezone().date()
    stamp = f"{when:%H:%M:%S}" if today else f"{when:%Y-%m-%d %H:%M:%S}"
    return f"{stamp}  {text.incident_line(incident)}"
