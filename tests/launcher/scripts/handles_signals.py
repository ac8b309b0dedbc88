"""A rank that counts the signals that schedulers send, by handlers of its own, until a file ends it."""

import os
import signal
import time
from pathlib import Path

import torch

folder = Path(os.environ["TEST_STEPS_DIR"])
found = [signal.Signals(number).name for number in (10, 12, 18, 20, 24) if signal.getsignal(number) != signal.SIG_DFL]
print(f"handlers before: {found}, torch {torch.__version__}", flush=True)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGXCPU):
    signal.signal(number, lambda number, _: print(f"rank got {signal.Signals(number).name}", flush=True))
helper = os.fork()
if helper == 0:
    signal.signal(signal.SIGUSR1, lambda *_: print("helper got SIGUSR1", flush=True))
    while True:
        time.sleep(0.1)
print(f"ready as {os.getpid()}", flush=True)
while not (folder / "stop").exists():
    time.sleep(0.01)
os.kill(helper, signal.SIGKILL)
