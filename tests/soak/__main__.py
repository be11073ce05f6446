"""``python -m tests.soak``: a thousand faults, and a table of what they came to."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from tqdm import tqdm

from tests.soak import settings


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks; returns 0 where every fault came to what it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is chosen (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument(
        "--runtime",
        action="append",
        choices=list(settings.RUNTIMES),
        help="only this one; repeat it for more",
    )
    parser.add_argument(
        "--config", action="append", choices=list(settings.CONFIGS), help="likewise"
    )
    parser.add_argument(
        "--without_grappler",
        action="store_true",
        help="sessions run their graphs as they are, and each start takes less time",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="an empty one for all files: what each fault came to (rows-*.jsonl), and the runs of "
        "those that came to a bad end (default: a temporary one, kept where it has such a run, or "
        "the soak is stopped)",
    )
    args = parser.parse_args(argv)
    directory = args.directory or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"--directory={directory} is not empty")
    print(f"files: {directory}", flush=True)
    # See `prebuilt`; TensorFlow reads it when it begins.
    os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
    # A soak in the background is stopped by it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed: list[str] = []
    try:
        failed += _soak(args, directory)
    except KeyboardInterrupt:
        failed.append("it was stopped")
    rows = _rows(directory)
    from tests.soak.table import tables

    print(tables(rows))
    bad = [row for row in rows if row["problems"]]
    for row in bad:
        where = f"{row['fault']} ({row['runtime']}, {row['config']}):"
        print(f"\n{where}", *row["problems"], sep="\n  ")
    for line in failed:
        print(f"\nnot all faults: {line}")
    if bad or failed or len(rows) < args.faults:
        return 1
    if args.directory is None:
        shutil.rmtree(directory)
    return 0


def _soak(args: argparse.Namespace, directory: Path) -> list[str]:
    """Hits runs with all faults; returns why some are missing."""
    from tests import grappler
    from tests.soak.lane import hit, make_reference, write_row
    from tests.soak.plan import plan
    from tests.soak.prebuilt import import_all, prebuilt

    import_all()
    # Building a graph makes many objects and no garbage.
    gc.set_threshold(100_000, 20, 20)
    if args.without_grappler:
        grappler.turn_off()
    runtimes = args.runtime or list(settings.RUNTIMES)
    groups = plan(args.seed, args.faults, runtimes, args.config or list(settings.CONFIGS))
    needed = dict.fromkeys(
        (group.runtime, config) for group in groups for config in group.configs()
    )
    with _bar(len(needed), "graphs") as bar:
        for runtime, config in needed:
            prebuilt(runtime.name, config)
            bar.update()
    # A fork's garbage collector would go through all graphs, and copy the pages that they are on.
    gc.collect()
    gc.freeze()
    references = directory / "references"
    with _bar(len(needed), "runs without faults") as bar:
        failed = _side_by_side(
            {
                f"{runtime.name}, {config}": lambda r=runtime, c=config: make_reference(
                    r, c, references
                )
                for runtime, config in needed
            },
            args.jobs,
            directory / "reference-jobs",
            bar,
            lambda done: done,
        )
    if failed:
        return failed

    def work(number: int) -> None:
        with (directory / f"rows-{number}.jsonl").open("w", encoding="utf-8") as file:
            hit(
                groups[number],
                references,
                directory / f"group-{number}",
                lambda row: write_row(file, row),
            )

    with _bar(args.faults, "faults") as bar:
        return _side_by_side(
            {
                f"{group.runtime.name}, {group.config}": lambda n=number: work(n)
                for number, group in enumerate(groups)
            },
            args.jobs,
            directory / "jobs",
            bar,
            lambda unused_done: len(_rows(directory)),
        )


def _side_by_side(
    work: dict[str, Callable[[], Any]],
    jobs: int,
    directory: Path,
    bar: Any,
    count: Callable[[int], int],
) -> list[str]:
    """Does work in forks of this process, some at a time; returns what failed, and how."""
    from tests.soak.child import Child

    waiting, running, done, failed = list(work.items()), {}, 0, []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                name, one = waiting.pop(0)
                running[name] = Child(lambda one=one: one() or 0, directory / name)
                stack.callback(running[name].kill)
            time.sleep(0.1)
            for name, child in list(running.items()):
                if child.poll() is None:
                    continue
                done += 1
                del running[name]
                if child.status:
                    failed.append(f"{name}: ended with {child.status}: {child.errors()[-2000:]}")
            bar.update(count(done) - bar.n)
    return failed


def _bar(total: int, unit: str) -> Any:
    # Now and then a line in a log, where a terminal has one that moves.
    return tqdm(total=total, unit="", desc=unit, mininterval=0.2 if sys.stderr.isatty() else 60)


def _rows(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("rows-*.jsonl"))
    lines = [line for file in files for line in file.open(encoding="utf-8")]
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    # A thread of its own would be missing in forks.
    tqdm.monitor_interval = 0
    sys.exit(main())
