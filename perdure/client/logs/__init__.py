"""What nodes printed, wherever it is: files of this machine, an agent that answers, or copies in object storage."""

from perdure.client.logs.read import LogLine, read_logs

__all__ = ["LogLine", "read_logs"]
