"""Tests of a signal that arrives while the main thread runs no Python code."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import hashlib, signal, subprocess, threading, time
from perdure_launcher.supervisor.signals import SignalFeed

heard = threading.Event()
SignalFeed((signal.SIGCHLD,), on_signal=lambda number: (seen.append((number, time.monotonic())), heard.set())).listen()
seen = []
child = subprocess.Popen(["sleep", "0.1"])
began = time.monotonic()
# It releases the interpreter's lock, and no handler of Python's runs before it returns.
hashlib.pbkdf2_hmac("sha512", b"", b"", 800_000)
returned = time.monotonic()
assert heard.wait(10)
[(number, at)] = seen
assert number == signal.SIGCHLD
# A handler in Python would run when the main thread has returned, and not halfway.
assert at - began < (returned - began) / 2, (at - began, returned - began)
"""


def test_it_is_handed_over_before_the_main_thread_returns() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
