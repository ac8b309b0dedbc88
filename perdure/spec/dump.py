"""Writes specifications as YAML that `load` reads back as the same values, and readers of YAML 1.1 too.

PyYAML by itself writes the text `1e-4` without quotes, which the rules of YAML 1.2 read as a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import yaml

from .durations import format_duration
from .load import use_scalars_of_yaml_1_2


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Writes a specification as plain data in its own order; durations may be `timedelta`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that either version of YAML reads as another scalar."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_duration(self, duration: timedelta) -> yaml.Node:
        return self.represent_str(format_duration(duration))


use_scalars_of_yaml_1_2(_Dumper)
_Dumper.add_representer(timedelta, _Dumper.represent_duration)
_Dumper.add_multi_representer(Mapping, _Dumper.represent_dict)
_Dumper.add_multi_representer(str, _Dumper.represent_str)
