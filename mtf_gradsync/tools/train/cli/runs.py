"""The commands that make a run, or use one: ``mtf-gradsync train``, ``sample``, ``timeline``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mtf_gradsync.extension import ACCEPT_FLAG, CONFIG_FILE, SKIP_FLAG, ConfigError, TrainingError
from mtf_gradsync.runtimes.processes.members import LOST_PROCESS_EXIT_CODE, MissingProcessesError
from mtf_gradsync.tools.train.cli.arguments import (
    Command,
    add_cluster_arguments,
    add_gin_arguments,
    add_json_argument,
    check_model_dir,
    config_of_run,
    gin_file_names,
    import_package,
    is_alone,
    loaded_config,
    named_write_errors,
    number,
    output_path,
    output_paths,
    process_of_flags,
    task_of_flags,
    whole_number,
    write_output,
)

if TYPE_CHECKING:
    from mtf_gradsync.tools.timelines import Timeline

_TRAIN_DESCRIPTION = """\
Trains a mesh_tensorflow.transformer model that gin files describe, then prints held-out
perplexity beside a unigram baseline, lets the model write, and leaves a page with plots
(report.html) and TensorBoard event files.

Ctrl-C stops after the current step and saves a checkpoint; the same command goes on from there."""

_TRAIN_EPILOG = """\
examples:
  mtf-gradsync train --gin_file=configs/lm_cpu_mesh.gin
  mtf-gradsync train --gin_file=lm_cpu_mesh.gin --gin_param="train.run.train_steps = 50"
  mtf-gradsync train --gin_file=my_model.gin --gin_file=my_data.gin --model_dir=runs/mine
  mtf-gradsync train --gin_file=my_model.gin --cluster_spec=worker=a:2222,b:2222 \\
      --job_name=worker --task_index=0      (on a; on b with --task_index=1)

docs/training.md lists the bindings of train.run and the files that a run writes."""


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--model_dir",
        metavar="DIR",
        help="where checkpoints and results go (default: runs/ and the name of the last gin file)",
    )
    parser.add_argument(
        ACCEPT_FLAG,
        action="store_true",
        help="go on from a checkpoint of another configuration, or with other data: what only one "
        "of them has is dropped, or begins as in a new run",
    )
    parser.add_argument(
        SKIP_FLAG,
        action="store_true",
        help="where the newest checkpoint is damaged, put it aside and go on from an older one",
    )
    add_cluster_arguments(parser)


def _train(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    files = gin_file_names(args)
    if args.model_dir and not (files or args.gin_param):
        left = Path(args.model_dir) / CONFIG_FILE
        if left.is_file():
            raise ConfigError(
                f"Give the config that made {args.model_dir}, or the one that this run has left: "
                f"--gin_file={left}"
            )
    model_dir = args.model_dir or os.path.join("runs", Path(files[-1]).stem if files else "train")
    # Of several processes only one writes there, and finds out after the meeting.
    if is_alone(args):
        check_model_dir(model_dir)
    with loaded_config(args):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.processes import run_on_cluster, run_on_processes
        from mtf_gradsync.tools.train.run import Accepted, RunResult, run

        accepted = Accepted(
            differences=args.accept_checkpoint_differences, damage=args.skip_damaged_checkpoint
        )
        process = process_of_flags(args)
        task = None if process else task_of_flags(args)
        config = gin_files.bound_run_config()
        watch = {"timeout": args.timeout, "silence": args.silence}
        result: RunResult | None
        try:
            if process:
                result = run_on_processes(config, model_dir, **process, **watch, accepted=accepted)
            elif task:
                watch.update(watch_port=args.watch_port, open_to_network=args.open_to_network)
                result = run_on_cluster(config, model_dir, task, **watch, accepted=accepted)
            else:
                result = run(config, model_dir, accepted=accepted)
        except MissingProcessesError as error:
            print(f"mtf-gradsync: error: {error}", file=sys.stderr)
            return LOST_PROCESS_EXIT_CODE
    return 0 if result is None or result.stopped_by is None else 128 + result.stopped_by


_SAMPLE_DESCRIPTION = """\
Prints what the language model of a run writes after a prompt: the run's own config and its newest
checkpoint, whatever runtime has made it. The run may be finished, stopped, or still going on."""

_SAMPLE_EPILOG = """\
examples:
  mtf-gradsync sample --model_dir=runs/lm_cpu_mesh --prompt="The list of "
  mtf-gradsync sample --model_dir=runs/lm_cpu_mesh --prompt=import --temperature=0
  mtf-gradsync sample --model_dir=runs/mine --prompt=a --gin_param="train.run.mesh_devices = None"
  mtf-gradsync sample --model_dir=runs/mine --prompt=a \\
      --gin_param="train.run.evaluate_with_averages = True"

Every token takes a pass of the whole model: that is for a look at a model, not for serving one."""


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("--model_dir", required=True, metavar="DIR", help="the run's directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument(
        "--num_samples", type=whole_number(), default=1, metavar="N", help="default: 1"
    )
    parser.add_argument(
        "--max_tokens",
        type=whole_number(),
        default=160,
        metavar="N",
        help="how long (default: 160)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.5,
        metavar="T",
        help="0 takes the most likely token, 1 draws from the model's distribution (default: 0.5)",
    )
    parser.add_argument(
        "--keep_top_k",
        type=whole_number(0),
        default=0,
        metavar="K",
        help="draw from this many most likely tokens (default: 0, from all)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 1 << 32),
        default=0,
        metavar="N",
        help="of the draws; default: 0",
    )
    add_json_argument(parser, "write the samples as JSON, too, with all characters")
    add_gin_arguments(parser)


def _sample(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file = output_path("--json", args.json)
    config_file = config_of_run(args.model_dir)
    try:
        args.prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # Python's arguments hold such bytes as surrogates
        raise ConfigError(f"--prompt={os.fsencode(args.prompt)!r} is no UTF-8 text") from error
    with loaded_config(args, [config_file]):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from mtf_gradsync.runtimes.starting import latest_checkpoint
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.evaluation import Sampling, sample_after, visible
        from mtf_gradsync.tools.train.model import resolve_job

        path = latest_checkpoint(args.model_dir)
        if path is None:
            raise ConfigError(f"--model_dir={args.model_dir} has no checkpoint yet")
        config = gin_files.bound_run_config()
        model = resolve_job(config).model
        print(f"from {path}", file=sys.stderr)
        settings = Sampling(
            num_samples=args.num_samples,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            keep_top_k=args.keep_top_k,
            seed=args.seed,
        )
        averages = config.evaluate_with_averages
        samples = sample_after(model, path, args.prompt, settings, averages)
    print("\n---\n".join(visible(one.prompt + one.continuation) for one in samples))
    found = {"checkpoint": path, "samples": [one._asdict() for one in samples]}
    write_output("--json", json_file, json.dumps(found, indent=2) + "\n")
    return 0


_TIMELINE_DESCRIPTION = """\
Makes some training steps of a run and tells where their time goes: compute, collectives, the part
of those that no compute hides, the host, and idle time, core by core, with the longest operations
and the largest collectives. Writes a trace for https://ui.perfetto.dev or chrome://tracing.

With --model_dir the steps are those after the run's newest checkpoint; nothing of the run changes.
Gin files and bindings go over the config that it has, or are in its place where it has none.
With --gin_file alone they begin with new values."""

_TIMELINE_EPILOG = """\
examples:
  mtf-gradsync timeline --model_dir=runs/lm_cpu_mesh
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --steps=20 --trace=lm.trace.json.gz
  mtf-gradsync timeline --gin_file=lm_cpu_mesh.gin --gin_param="train.run.runtime = 'cpu_replicas'"
  mtf-gradsync timeline --merge=a.part.json --merge=b.part.json --trace=both.trace.json.gz

Processes on XLA devices all take the command; process 0 writes the result for all. --part writes
what one process recorded, for --merge. docs/guides/timeline.md explains the numbers."""


def _timeline_arguments(parser: argparse.ArgumentParser) -> None:
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
        type=whole_number(),
        default=10,
        metavar="N",
        help="steps to record, tens rather than thousands: they are held in memory (default: 10)",
    )
    parser.add_argument(
        "--warm_up",
        type=whole_number(),
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
    add_json_argument(parser, "write the table as JSON, too")
    parser.add_argument("--part", metavar="FILE", help="write what this process recorded, too")
    parser.add_argument(
        "--merge",
        action="append",
        default=[],
        metavar="FILE",
        help="make no steps, but put files of --part together; given once for each",
    )
    add_cluster_arguments(parser)


def _timeline(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
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
            with named_write_errors("--trace", trace):
                written = timeline.save(trace)
            print(f"\n{written}")
        write_output("--json", json_file, table.to_json() + "\n")
    if part_file:
        mine = next((r for r in timeline.recordings if r.process == own), timeline.recordings[0])
        write_output("--part", part_file, mine.to_json())
    return 0


def _merged(files: list[str]) -> Timeline:
    import_package(verbosity=-1)
    from mtf_gradsync.tools.timelines import Recording, Timeline, TimelineError

    try:
        parts = [Recording.from_json(Path(name).read_text(encoding="utf-8")) for name in files]
        return Timeline.of(parts)
    except (OSError, UnicodeDecodeError, TimelineError) as error:
        raise ConfigError(f"--merge: {error}") from error


def _left_config(args: argparse.Namespace) -> list[str]:
    """The config file of the run, where it has one or needs one."""
    if not args.model_dir:
        if not (args.gin_file or args.gin_param):
            raise ConfigError(
                "Give at least one --gin_file or --model_dir: there is nothing to record"
            )
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
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.processes import run_on_cluster, run_on_processes
        from mtf_gradsync.tools.train.run import Accepted, TimedRun

        process = process_of_flags(args)
        task = None if process else task_of_flags(args)
        config, work = gin_files.bound_run_config(), TimedRun(args.steps, args.warm_up)
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
                watch.update(watch_port=args.watch_port, open_to_network=args.open_to_network)
                return run_on_cluster(config, folder, task, **watch, accepted=accepted, work=work)
        except MissingProcessesError as error:
            raise TrainingError(str(error)) from error


TRAIN = Command(
    "train a transformer that gin files describe",
    _TRAIN_DESCRIPTION,
    _TRAIN_EPILOG,
    _train_arguments,
    _train,
)
SAMPLE = Command(
    "let the model of a run write", _SAMPLE_DESCRIPTION, _SAMPLE_EPILOG, _sample_arguments, _sample
)
TIMELINE = Command(
    "record where the time of a training step goes",
    _TIMELINE_DESCRIPTION,
    _TIMELINE_EPILOG,
    _timeline_arguments,
    _timeline,
)
