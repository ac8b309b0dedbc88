"""A rank with a helper that outlives it: it holds the port, ignores SIGTERM and has none of the variables,
like a program that overwrites them to set its title."""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from descent import Descent

HELPER = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("helps", flush=True)
while True: signal.pause()
"""

port = Path(os.environ["TEST_STEPS_DIR"]) / "port"
with socket.socket() as listening:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(port.read_text()) if port.exists() else 0))
    listening.listen()
    port.write_text(str(listening.getsockname()[1]))
    listening.set_inheritable(True)
    helper = os.fork()
    if helper == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-E", "-c", HELPER], {})
    (port.parent / f"helper-{os.environ['PERDURE_GENERATION']}").write_text(str(helper))
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Descent([parameter], lr=0.1)
    while True:
        parameter.grad = torch.ones(1)
        optimizer.step()
        time.sleep(0.01)
