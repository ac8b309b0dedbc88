"""Output of nodes, wherever it is: files of this machine, a running agent, or copies in object storage."""

from perdure.client.logs.agents import ask_agent
from perdure.client.logs.lines import LogLine
from perdure.client.logs.read import Selection, look_at_roles, read_copies, read_logs

__all__ = ["LogLine", "Selection", "ask_agent", "look_at_roles", "read_copies", "read_logs"]
