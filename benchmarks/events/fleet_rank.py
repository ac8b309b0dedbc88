"""A rank that makes a step a second, reports it, and emits what a training emits."""

from __future__ import annotations

import itertools
import time

from perdure_training import report
from perdure_training.events import TrainerEvents

events = TrainerEvents()
events.start()
for number in itertools.count(1):
    with events.step(step=number):
        time.sleep(1)
    events.metrics(step=number, loss=1 / number, learning_rate=0.1)
    report(step=number, loss=1 / number, mfu=0.4)
