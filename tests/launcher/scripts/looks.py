"""Prints everything that a script can observe of its start, as JSON, and then ends as its first argument says."""

import atexit
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

MAIN = ("__name__", "__file__", "__spec__", "__package__", "__loader__", "__builtins__", "__cached__", "__doc__")
STATUS = ("SigBlk", "SigIgn", "SigCgt", "Cpus", "Uid", "Umask")


class Picklable:
    pass


def in_a_process(answers: "multiprocessing.Queue[list[str]]") -> None:
    answers.put([__name__, *sys.argv, str(multiprocessing.parent_process() is not None)])


def through_multiprocessing(method: Any) -> list[str]:
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=in_a_process, args=(answers,))
    process.start()
    answer = answers.get(timeout=30)
    process.join()
    return answer


def looks_with_torch() -> dict[str, object]:
    import torch
    import torch._dynamo

    return {
        **looks(),
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "sum": torch.ones(1000, 1000).matmul(torch.ones(1000, 1000)).sum().item(),
    }


def looks() -> dict[str, object]:
    main = sys.modules["__main__"]
    status = pathlib.Path("/proc/self/status").read_text()
    child = [sys.executable, "-c", "import os, sys; print(sorted(os.environ), sys.path)"]
    return {
        "main": {name: str(vars(main).get(name)).split(" at 0x")[0] for name in MAIN},
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": list(sys.flags),
        "warnoptions": sys.warnoptions,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "cmdline": pathlib.Path("/proc/self/cmdline").read_text(),
        "name": pathlib.Path("/proc/self/comm").read_text(),
        "streams": [[s.encoding, s.errors, s.line_buffering, s.isatty()] for s in (sys.stdin, sys.stdout, sys.stderr)],
        "write_through": [getattr(stream, "write_through", None) for stream in (sys.stdout, sys.stderr)],
        "files": [name for name in os.listdir("/proc/self/fd") if int(name) < 64],
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "status": [line for line in status.splitlines() if line.startswith(STATUS)],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "score": pathlib.Path("/proc/self/oom_score_adj").read_text(),
        "options": sys._xoptions,
        "input": os.readlink("/proc/self/fd/0"),
        "affinity": sorted(os.sched_getaffinity(0)),
        "session": os.getsid(0) == os.getpid(),
        "threads": threading.active_count(),
        "main_thread": threading.current_thread() is threading.main_thread(),
        "pickled": type(pickle.loads(pickle.dumps(Picklable()))).__module__,
        "spawn": through_multiprocessing("spawn"),
        "fork": through_multiprocessing("fork"),
        "child": subprocess.check_output(child, text=True),
    }


def fail() -> None:
    raise ValueError("as asked for")


def main() -> None:
    ending = sys.argv[1]
    if ending == "looks":
        print(json.dumps(looks_with_torch() if "torch" in sys.argv else looks()))
    elif ending == "numbers":
        print(random.random())
    elif ending == "random":
        import torch
        from sympy.core import random as sympys

        print(random.random(), torch.rand(()).item(), torch.initial_seed(), sympys.random())
    elif ending == "atexit":
        atexit.register(print, "at exit")
    elif ending == "exception":
        fail()
    elif ending == "text":
        sys.exit("a last line")
    elif ending == "code":
        sys.exit(int(sys.argv[2]))
    elif ending == "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
    elif ending == "wait":
        print(os.getpid(), flush=True)
        signal.pause()
    elif ending == "handle":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        print(os.getpid(), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
