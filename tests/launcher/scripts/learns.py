"""Imports the modules that its arguments name, reports them, and prints what existed before, as JSON.

An argument `SETTING=x` sets the variable first; an argument with a colon prints that attribute of a module.
"""

import importlib
import json
import os
import sys

before = set(sys.modules)
values: dict[str, object] = {}
for word in sys.argv[1:]:
    setting, assigned, value = word.partition("=")
    if assigned:
        os.environ.update({setting: value})
        continue
    name, asked, attribute = word.partition(":")
    module = importlib.import_module(name)
    if asked:
        values[word] = getattr(module, attribute)
print(json.dumps({"ahead": sorted(before & set(sys.modules)), "values": values}))

import torch  # noqa: E402

from perdure_launcher.warm_start import learning  # noqa: E402

torch.zeros(1)
learning.tell()
