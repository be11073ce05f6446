"""``mtf-gradsync timeline``: where the time of a training step goes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mtf_gradsync.runtimes.errors import ACCEPT_FLAG, ConfigError, TrainingError
from mtf_gradsync.train.cli.cluster_arguments import (
    add_cluster_arguments,
    process_of_flags,
    task_of_flags,
)
from mtf_gradsync.train.cli.gin_arguments import (
    add_gin_arguments,
    config_of_run,
    gin_file_names,
    loaded_config,
    positive_count,
)
from mtf_gradsync.train.cli.outputs import output_paths, writing

if TYPE_CHECKING:
    from mtf_gradsync.timelines import Timeline

HELP = "record where the time of a training step goes"
DESCRIPTION = """\
Makes some training steps of a run and tells where their time goes: compute, collectives, the part
of those that no compute hides, the host, and idle time, core by core, with the longest operations
and the largest collectives. Writes a trace for https://ui.perfetto.dev or chrome://tracing.

With --model_dir the steps are those after the run's newest checkpoint; nothing of the run changes.
Gin files and bindings go over the config that it has, or are in its place where it has none.
With --gin_file alone they begin with new values."""

EPILOG = """\
examples:
  mtf-gradsync timeline --model_dir=runs/lm_cpu_mesh
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --steps=20 --trace=lm.trace.json.gz
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --gin_param="train.run.runtime = 'cpu_replicas'"
  mtf-gradsync timeline --merge=a.part.json --merge=b.part.json --trace=both.trace.json.gz

Processes on XLA devices all take the command; process 0 writes the result for all. --part writes
what one process recorded, for --merge. docs/guides/timeline.md explains the numbers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument("--model_dir", metavar="DIR", help="the directory of a run")
    parser.add_argument(
        ACCEPT_FLAG,
        action="store_true",
        help="take a checkpoint of another configuration: what only one of them has is dropped, or "
        "begins as in a new run",
    )
    parser.add_argument(
        "--steps",
        type=positive_count,
        default=10,
        metavar="N",
        help="steps to record, tens rather than thousands: they are held in memory (default: 10)",
    )
    parser.add_argument(
        "--warm_up",
        type=positive_count,
        default=5,
        metavar="N",
        help="steps before those, which compile and fill caches (default: 5)",
    )
    parser.add_argument(
        "--trace",
        default="timeline.trace.json.gz",
        metavar="FILE",
        help="where the trace goes, at most 20 MB (default: timeline.trace.json.gz)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--part", metavar="FILE", help="write what this process recorded, too")
    parser.add_argument(
        "--merge",
        action="append",
        default=[],
        metavar="FILE",
        help="make no steps, but put files of --part together; given once for each",
    )
    add_cluster_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    from mtf_gradsync.runtimes.manifest import write_text  # imports TensorFlow

    outputs = {"--trace": args.trace, "--json": args.json, "--part": args.part}
    trace, json_file, part_file = output_paths(outputs)
    timeline = _merged(args.merge) if args.merge else _recorded(args)
    if timeline is None:
        return 0
    own = args.process_id or 0
    if own == 0:  # the others have the same
        table = timeline.table()
        print(table)
        if trace:
            with writing("--trace", trace):
                written = timeline.save(trace)
            print(f"\n{written}")
        if json_file:
            with writing("--json", json_file):
                write_text(json_file, table.to_json() + "\n")
    if part_file:
        mine = next((r for r in timeline.recordings if r.process == own), timeline.recordings[0])
        with writing("--part", part_file):
            write_text(part_file, mine.to_json())
    return 0


def _merged(files: list[str]) -> Timeline:
    from mtf_gradsync.timelines import Recording, Timeline, TimelineError

    try:
        parts = [Recording.from_json(Path(name).read_text(encoding="utf-8")) for name in files]
        return Timeline.of(parts)
    except (OSError, UnicodeDecodeError, TimelineError) as error:
        raise ConfigError(f"--merge: {error}") from error


def _left_config(args: argparse.Namespace) -> list[str]:
    """The config file of the run, where it has one or needs one."""
    if not args.model_dir:
        return []
    try:
        return [config_of_run(args.model_dir)]
    except ConfigError as error:
        is_run = any(Path(args.model_dir).glob("*.index"))
        if is_run and gin_file_names(args):
            return []
        hint = "; give its config by --gin_file" if is_run else ", and no checkpoint"
        raise ConfigError(f"{error}{hint}") from error


def _recorded(args: argparse.Namespace) -> Timeline | None:
    with loaded_config(args, _left_config(args)):
        # Not above: these take seconds, which `--help` need not.
        from mtf_gradsync.processes.members import MissingProcessesError
        from mtf_gradsync.train import gin_files
        from mtf_gradsync.train.processes import run_on_cluster, run_on_processes
        from mtf_gradsync.train.run import Accepted
        from mtf_gradsync.train.timed_run import TimedRun

        process = process_of_flags(args)
        task = None if process else task_of_flags(args)
        config, work = gin_files.run_config(), TimedRun(args.steps, args.warm_up)
        watch = {"timeout": args.timeout, "silence": args.silence}
        accepted = Accepted(differences=args.accept_checkpoint_differences)
        if process is None and task is None:
            return work(config, args.model_dir, accepted=accepted)
        try:
            with tempfile.TemporaryDirectory() as empty:
                folder = args.model_dir or empty
                if process:
                    return run_on_processes(
                        config,
                        folder,
                        **process,
                        **watch,
                        accepted=accepted,
                        work=work,
                        settings={"--steps": args.steps, "--warm_up": args.warm_up},
                        first_does="prints and writes the timeline",
                    )
                assert task is not None
                watch["watch_port"] = args.watch_port
                return run_on_cluster(config, folder, task, **watch, accepted=accepted, work=work)
        except MissingProcessesError as error:
            raise TrainingError(str(error)) from error
