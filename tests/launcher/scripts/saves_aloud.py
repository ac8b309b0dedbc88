"""Prints while it saves after SIGTERM, for longer than leftovers have to end."""

import signal
import time


def save(*_: object) -> None:
    for part in range(4):
        print(f"part {part} is saved", flush=True)
        time.sleep(0.6)
    print("all is saved", flush=True)
    raise SystemExit(0)


signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
while True:
    time.sleep(0.05)
