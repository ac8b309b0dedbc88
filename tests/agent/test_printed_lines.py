"""Tests of what a node that failed tells of its output: what is one line, and what may say why it failed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from perdure.agent.printed_lines import printed_lines
from perdure.contract import Failure, PrintedLines
from perdure_launcher.log_times import TimesWriter
from perdure_training.node_api.bodies import ReadyReport
from perdure_training.node_api.layout import LOG_TIMES, LOGS, OUTPUT_LOG
from tests.agent.bench import IDENTITY, NOW, Bench, rank
from tests.support.desired import desired_world


def printed(run_dir: Path, *pieces: tuple[float, str]) -> PrintedLines:
    """What a node tells that printed these pieces so many seconds before it failed."""
    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    (logs / OUTPUT_LOG).write_text("".join(text for _, text in pieces))
    offset = 0
    for before, text in pieces:
        writer = TimesWriter(logs / LOG_TIMES, clock=lambda before=before: NOW.timestamp() - before)
        writer.note(offset)
        writer.close()
        offset += len(text.encode())
    return printed_lines(run_dir, "".join(text for _, text in pieces), generation=1, failed_at=NOW)


def told(found: PrintedLines) -> list[str]:
    return [line.text for line in found.rare]


def test_the_newest_rare_lines_come_first(tmp_path: Path):
    output = "".join(f"step {step} loss 2.{step}\n" for step in range(20))
    found = printed(tmp_path, (5, f"{output}link of mlx5_2 is down\nretrying on mlx5_3\nstep 20 loss 3.0\n"))
    assert told(found) == ["retrying on mlx5_3", "link of mlx5_2 is down"]
    assert len(found.keys) == 3


def test_lines_that_differ_in_numbers_prefixes_and_colours_are_one(tmp_path: Path):
    one = printed(tmp_path, (1, "[rank3]: \x1b[33mworker 0x7f3a of 10.0.0.3:29500 at 12:00:01.5 took 1.5 s\x1b[0m\n"))
    other = printed(tmp_path, (1, "worker 0x55bc of 10.0.0.4:31000 at 12:00:02.7 took 22 s\n"))
    assert one.keys == other.keys


def test_what_was_printed_long_before_is_known_and_says_nothing(tmp_path: Path):
    found = printed(tmp_path, (3600, "a model of 7B parameters\n"), (2, "the disk is slow\n"))
    assert told(found) == ["the disk is slow"]
    assert len(found.keys) == 2


def test_tracebacks_and_what_torchrun_says_of_them_are_left_out(tmp_path: Path):
    trace = """a last warning
[rank1]: Traceback (most recent call last):
[rank1]:   File "/code/train.py", line 3, in <module>
[rank1]:     step()
[rank1]: ValueError: bad batch
E1126 13:00:00.1 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0
"""
    assert told(printed(tmp_path, (1, trace))) == ["a last warning"]


def test_a_node_without_a_log_tells_nothing(tmp_path: Path):
    assert printed_lines(tmp_path, "", generation=1, failed_at=NOW) == PrintedLines(generation=1)


def test_a_report_carries_it_in_a_job_of_several_nodes_only(tmp_path: Path):
    for nodes, folder in (("2:4", tmp_path / "several"), ("1", tmp_path / "one")):
        folder.mkdir()
        bench = Bench(folder, nodes=nodes)
        bench.apply(1)
        bench.enter(1)
        (folder / LOGS).mkdir()
        (folder / LOGS / OUTPUT_LOG).write_text("the disk is slow\n")
        late = datetime.now(UTC) - timedelta(seconds=1)
        bench.node.on_ready(ReadyReport(after_generation=1, ranks=(rank(time=late.timestamp()),)))
        [failure] = bench.job.of(Failure)
        assert (failure.printed is not None) is (nodes != "1")
        if failure.printed is not None:
            assert told(failure.printed) == ["the disk is slow"]


def test_a_node_whose_ranks_a_newer_world_ends_tells_its_keys_if_it_is_one_of_the_first(tmp_path: Path):
    bench = Bench(tmp_path)
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / OUTPUT_LOG).write_text("the disk is slow\n")
    world = partial(desired_world, IDENTITY, nodes=2, processes=2, store_port=29500)
    assert bench.desire(world=world(generation=1)).printed is None, "it was in no world"
    bench.enter(1)
    printed = bench.desire(world=world(generation=2)).printed
    assert printed is not None
    assert (printed.generation, len(printed.keys), printed.rare) == (1, 1, ())
    assert bench.desire(world=world(generation=2)).printed is None
