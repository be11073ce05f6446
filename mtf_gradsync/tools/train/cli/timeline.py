"""Record where the time of a training step goes.

Makes some training steps of a run and shows how the steps' time is divided on each core: compute,
collectives, the part of collectives during which nothing is computed, the host, and idle time. It
also shows the longest operations and the largest collectives, and writes a trace that
https://ui.perfetto.dev and chrome://tracing display.

With --model_dir the recorded steps are the ones after the run's newest checkpoint; no file of the
run changes. Gin files and bindings override the config that the run left in its directory, or
replace this config if the run has left none. With --gin_file and without --model_dir the steps
begin with new initial values of the variables.

Examples:
  mtf-gradsync timeline --model_dir=runs/lm_cpu_mesh
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --steps=20 --trace=lm.trace.json.gz
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --gin_param="train.run.runtime = 'cpu_replicas'"
  mtf-gradsync timeline --merge=a.part.json --merge=b.part.json --trace=both.trace.json.gz

With several processes on XLA devices, start this command in each process; process 0 writes the
result of all processes. --part writes the recording of one process into a file of its own, and
--merge puts such files together. docs/guides/timeline.md explains the numbers that this command
shows.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mtf_gradsync.runtimes._common import ACCEPT_FLAG, ConfigError, TrainingError
from mtf_gradsync.runtimes.processes.members import MissingProcessesError
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import import_package, loaded_config
from mtf_gradsync.tools.train.cli.process_flags import add_cluster_arguments, is_alone, run_by_flags

if TYPE_CHECKING:
    from mtf_gradsync.tools.timelines import Timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync timeline`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument("--model_dir", metavar="DIR", help="the directory of a run")
    parser.add_argument(
        ACCEPT_FLAG,
        action="store_true",
        help="take a checkpoint of another configuration: a variable of the checkpoint alone "
        "is dropped, and one of the run alone begins as in a new run",
    )
    steps = "steps to record, tens rather than thousands: they are held in memory"
    flags.add_number(parser, "--steps", "N", steps, 10, flags.whole_number())
    warm_up = "steps to make before the recorded ones, which compile and fill caches"
    flags.add_number(parser, "--warm_up", "N", warm_up, 5, flags.whole_number())
    parser.add_argument(
        "--trace",
        default="timeline.trace.json.gz",
        metavar="FILE",
        help="file for the trace, at most 20 MB (default: timeline.trace.json.gz)",
    )
    flags.add_json_argument(parser, "write the table as JSON, too")
    parser.add_argument("--part", metavar="FILE", help="write what this process has recorded, too")
    parser.add_argument(
        "--merge",
        action="append",
        default=[],
        metavar="FILE",
        help="make no steps, but put files of --part together; give the flag once for each file",
    )
    add_cluster_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync timeline`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0. If the command fails, a ConfigError or TrainingError is raised.
    """
    outputs = {"--trace": args.trace, "--json": args.json, "--part": args.part}
    trace, json_file, part_file = flags.output_paths(outputs)
    timeline = _merged(args.merge) if args.merge else _recorded(args)
    if timeline is None:
        return 0
    own = args.process_id or 0
    if own == 0:  # the other processes have the same result
        table = timeline.table()
        print(table)
        if trace:
            with flags.named_write_errors("--trace", trace):
                written = timeline.save(trace)
            print(f"\n{written}")
        flags.write_output("--json", json_file, table.to_json() + "\n")
    if part_file:
        part = next((r for r in timeline.recordings if r.process == own), timeline.recordings[0])
        flags.write_output("--part", part_file, part.to_json())
    return 0


def _merged(files: list[str]) -> Timeline:
    import_package(verbosity=-1)
    from mtf_gradsync.tools.timelines import Recording, Timeline, TimelineError
    from mtf_gradsync.tools.train.errors import raised_as

    with raised_as(ConfigError, OSError, UnicodeDecodeError, TimelineError, before="--merge: "):
        parts = [Recording.from_json(Path(name).read_text(encoding="utf-8")) for name in files]
        return Timeline.of(parts)


def _left_config(args: argparse.Namespace) -> list[str]:
    """Returns the path of the config file that a run left in --model_dir, in a list.

    The list is empty without --model_dir, but if there are no gin flags either, ConfigError is
    raised. If the run has left no config file, but has a checkpoint, and --gin_file gives a config,
    the list is also empty. If one of these two is missing, too, ConfigError is raised.
    """
    if not args.model_dir:
        if not (args.gin_file or args.gin_param):
            raise ConfigError(
                "Give at least one --gin_file or --model_dir: there is nothing to record"
            )
        return []
    try:
        return [flags.config_of_run(args.model_dir)]
    except ConfigError as error:
        is_run = any(Path(args.model_dir).glob("*.index"))
        if is_run and flags.names_in(args.gin_file):
            return []
        hint = "; give its config by --gin_file" if is_run else ", and no checkpoint"
        raise ConfigError(f"{error}{hint}") from error


def _recorded(args: argparse.Namespace) -> Timeline | None:
    with loaded_config(args, _left_config(args)), tempfile.TemporaryDirectory() as empty:
        # Not above: these take seconds, which `--help` need not.
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.errors import raised_as
        from mtf_gradsync.tools.train.timed_run import record_steps

        recorded = {"steps": args.steps, "warm_up": args.warm_up}
        work = functools.partial(
            record_steps, accepts_differences=args.accept_checkpoint_differences, **recorded
        )

        with raised_as(TrainingError, MissingProcessesError):
            return run_by_flags(
                args,
                gin_files.bound_run_config(),
                args.model_dir or (None if is_alone(args) else empty),
                work,
                settings={f"--{name}": number for name, number in recorded.items()},
                first_does="prints and writes the timeline",
            )
