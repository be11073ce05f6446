"""``python -m tests.soak``: a thousand faults, and a table of what they came to."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence

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
    parser.add_argument("--directory", type=Path, help="keep files here; those of bad ends stay")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.runtime = args.runtime or list(settings.RUNTIMES)
    args.config = args.config or list(settings.CONFIGS)
    if args.lane is not None:
        return _lane(args)
    with contextlib.ExitStack() as stack:
        if args.directory is None:
            args.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows, failed = _lanes(args)
    from tests.soak.table import table

    print(table(rows))
    bad = [row for row in rows if row["problems"]]
    for row in bad:
        print(
            f"\n{row['fault']} ({row['runtime']}, {row['config']}):", *row["problems"], sep="\n  "
        )
    return int(bool(bad) or failed or len(rows) < args.faults)


def _lanes(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Runs the lanes side by side; returns what they saw, and whether one failed."""
    args.directory.mkdir(parents=True, exist_ok=True)
    jobs = max(1, min(args.jobs, args.faults))
    shares = [args.faults // jobs + (i < args.faults % jobs) for i in range(jobs)]
    lanes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "tests.soak", f"--lane={i}", f"--faults={share}",
                f"--seed={args.seed}", f"--directory={args.directory}",
                *(f"--runtime={one}" for one in args.runtime),
                *(f"--config={one}" for one in args.config),
            ],
            stdin=subprocess.DEVNULL,
            # See `prebuilt`.
            env={**os.environ, "TF_OVERRIDE_GLOBAL_THREADPOOL": "1"},
        )
        for i, share in enumerate(shares)
    ]  # fmt: skip
    try:
        with tqdm(total=args.faults, unit="fault", disable=None) as bar:
            while any(lane.poll() is None for lane in lanes):
                time.sleep(0.2)
                bar.update(len(_rows(args.directory)) - bar.n)
    finally:
        for lane in lanes:
            lane.kill()
            lane.wait()
    return _rows(args.directory), any(lane.returncode for lane in lanes)


def _rows(directory: Path) -> list[dict[str, Any]]:
    lines = [
        line for file in sorted(directory.glob("lane-*.jsonl")) for line in file.open() if line
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _lane(args: argparse.Namespace) -> int:
    from tests.soak.lane import soak, write_row

    with (args.directory / f"lane-{args.lane}.jsonl").open("w", encoding="utf-8") as file:
        soak(
            args.seed * 1000 + args.lane,
            args.faults,
            args.runtime,
            args.config,
            args.directory / f"lane-{args.lane}",
            lambda row: write_row(file, row),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
