"""Output of nodes, wherever it is: files of this machine, a running agent, or copies in object storage."""

from perdure.client.logs.read import LogLine, read_logs

__all__ = ["LogLine", "read_logs"]
