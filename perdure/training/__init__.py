"""`perdure_training` under its former name, for scripts that run where `perdure` is installed."""

from perdure_training import report

__all__ = ["report"]
