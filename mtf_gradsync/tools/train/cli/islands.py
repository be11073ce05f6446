"""Merge what islands contribute to a folder, show or replay it.

Runs the merger of ElasticIslands until the command is stopped: makes new versions of a model's
values (the merged values, each time with a new number) from what islands have contributed to a
folder. If the merger is killed at any moment and started again, it makes the same versions, bit for
bit.

Examples:
  mtf-gradsync islands runs/folder --quorum=2
  mtf-gradsync islands gs://bucket/folder --keep_all
  mtf-gradsync islands runs/folder --status --plot=islands.png
  mtf-gradsync islands runs/folder --status --watch=10
  mtf-gradsync islands runs/folder --export=runs/exported --version=40 --run=runs/a
  mtf-gradsync islands runs/folder --replay
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from mtf_gradsync.runtimes._common import CONFIG_FILE, ConfigError, TrainingError
from mtf_gradsync.runtimes._signals import StopSignal, signal_of
from mtf_gradsync.tools.islands.changes import MergeSettings
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.journal import plot_status, read_status
from mtf_gradsync.tools.islands.merger import Merger, MergerError, Quorum, Waiting
from mtf_gradsync.tools.islands.objects import Decision
from mtf_gradsync.tools.islands.tensor_files import DamagedObjectError
from mtf_gradsync.tools.islands.versions import newest_version, replay
from mtf_gradsync.tools.train.cli import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync islands`` to its parser."""
    parser.add_argument("folder", metavar="FOLDER", help="path or URL that all islands know")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print what has become of each island")
    what.add_argument(
        "--replay", action="store_true", help="make every version again and compare the bits"
    )
    what.add_argument(
        "--export",
        metavar="DIR",
        help="write a version as a checkpoint that train and Saver restore",
    )
    parser.add_argument(
        "--version", type=int, help="with --export: the number of the version (the newest)"
    )
    parser.add_argument(
        "--run",
        metavar="RUN_DIR",
        help="with --export: a run that is an island, whose config goes along for sample and train",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="with --status: print the status again and again, once in so many seconds",
    )
    parser.add_argument("--plot", metavar="FILE", help="with --status: draw a row for each island")
    flags.add_json_argument(parser, "with --status: write the status as JSON, too")
    waiting = Waiting()
    for name, kind, text in (
        ("quorum", _quorum, "how many contributions a version needs, or 'living'"),
        ("min_grace", float, "wait at least so many seconds for more contributions"),
        (
            "max_grace",
            float,
            "wait at most so many seconds; the wait adapts to how far apart contributions come",
        ),
        ("max_staleness", int, "how many versions old a contribution may be that is merged"),
    ):
        default = getattr(waiting, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default:g})")
    settings = MergeSettings()
    group = parser.add_argument_group("how versions are made; of the folder once it has one")
    group.add_argument(
        "--outer_learning_rate", type=float, help=f"({settings.outer_learning_rate:g})"
    )
    group.add_argument("--outer_momentum", type=float, help=f"({settings.outer_momentum:g})")
    group.add_argument(
        "--no_nesterov", dest="nesterov", action="store_const", const=False, help="plain momentum"
    )
    group.add_argument("--fragments", type=int, help="sets of variables that take turns (1)")
    parser.add_argument(
        "--keep_all", action="store_true", help="keep all versions and contributions, for --replay"
    )


def _quorum(text: str) -> Quorum:
    """Parses the value of --quorum, a whole number or "living".

    Raises argparse.ArgumentTypeError for another text.
    """
    if text == "living":
        return "living"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"quorum must be a whole number or 'living', got {text!r}"
        ) from None


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync islands`` with its parsed flags `args`, and returns the exit code.

    The exit code is 1 if --replay has found versions that, made again, have other bits than the
    stored ones. It is 128 + n if signal n has ended the command, and otherwise 0.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        folder = Folder(args.folder)
        for flag, does in (("plot", "draws"), ("json", "writes")):
            name = getattr(args, flag)
            if name and not args.status:
                raise ConfigError(f"--{flag}={name} {does} the status; add --status")
        for flag, needed in (("watch", "status"), ("version", "export"), ("run", "export")):
            if getattr(args, flag) is not None and not getattr(args, needed):
                raise ConfigError(f"--{flag} goes with --{needed}")
        if args.export:
            return _export(folder, Path(args.export), args.version, args.run)
        if args.watch:
            return _watch(folder, args.watch)
        if args.status:
            outputs = {"--json": args.json, "--plot": args.plot}
            return _status(folder, *flags.output_paths(outputs))
        if args.replay:
            return _replay(folder)
        return _merge(folder, args)
    except (DamagedObjectError, FolderError, MergerError) as error:
        raise TrainingError(str(error)) from error
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _status(folder: Folder, json_file: Path | None, plot: Path | None) -> int:
    status = read_status(folder)
    if status.version is None and not status.rows:
        raise TrainingError(f"{folder.url} is no folder of islands: no island has joined it yet")
    print(status.table())
    found = {"version": status.version, "islands": [row._asdict() for row in status.rows]}
    flags.write_output("--json", json_file, json.dumps(found, indent=2) + "\n")
    if plot:
        from mtf_gradsync.tools.train.figures import new_figure, write_figure

        figure = new_figure(9.0, 1.5 + 0.4 * len(status.rows))
        plot_status(status, figure.add_subplot())
        write_figure(plot, figure)
        print(f"plot: {plot}")
    return 0


def _watch(folder: Folder, seconds: float) -> int:
    """Prints a table of the islands of `folder` every `seconds` seconds, until a signal comes.

    On a terminal the screen is cleared before. Returns the exit code, 128 + n for signal n.
    """
    clear = "\033[2J\033[H" if sys.stdout.isatty() else ""
    try:
        while True:
            try:
                print(f"{clear}{read_status(folder).table()}", flush=True)
            except FolderError as error:
                print(f"{clear}{error}", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt as error:  # the only end of --watch, of which no message has to tell
        return 128 + signal_of(error)


def _export(folder: Folder, directory: Path, version: int | None, run: str | None) -> int:
    """Writes the values that all islands share as a TensorFlow checkpoint to `directory`.

    `version` is the number of the version whose values are written, None for the newest version.
    `run` is the directory of a run whose config is written next to the checkpoint, None for no
    config. Returns the exit code 0.
    """
    from mtf_gradsync.tools.islands.versions import export_version

    config = Path(flags.config_of_run(run)).read_text(encoding="utf-8") if run else ""
    path = export_version(folder, directory, version)
    if config:
        # What is exported is no island, and its config must not begin one.
        alone = f"{config.rstrip()}\n\nElasticIslands.folder = ''\n"
        (directory / CONFIG_FILE).write_text(alone, encoding="utf-8")
    print(f"checkpoint: {path}")
    return 0


def _replay(folder: Folder) -> int:
    from tqdm import tqdm

    last = newest_version(folder)
    with tqdm(total=1 if last is None else last + 1, unit="version", disable=None) as bar:
        wrong = replay(folder, lambda version, is_equal: bar.update() and None)
    if wrong:
        print(f"other bits in {len(wrong)} of {(last or 0) + 1} versions: {wrong[:10]}")
        return 1
    print(f"{(last or 0) + 1} versions: equal, bit for bit")
    return 0


def _merge(folder: Folder, args: argparse.Namespace) -> int:
    names = ("outer_learning_rate", "outer_momentum", "nesterov", "fragments")
    given = {name: x for name in names if (x := getattr(args, name)) is not None}
    settings = (MergeSettings.of(folder) or MergeSettings())._replace(**given)
    waiting = Waiting(args.quorum, args.min_grace, args.max_grace, args.max_staleness)
    merger = Merger(folder, settings, waiting, args.keep_all)
    needed = "those of all living islands" if args.quorum == "living" else args.quorum
    print(f"merging in {folder.url}, {needed} contributions or more", flush=True)
    with StopSignal() as stop:
        merger.run(lambda: stop.received is not None, _print_version)
    return 128 + stop.received if stop.received else 0


def _print_version(decision: Decision) -> None:
    whose = ", ".join(f"{c.island} ({c.weight:g})" for c in decision.contributions)
    late = [c.island for c in decision.dropped]
    after = f"; too late: {', '.join(late)}" if late else ""
    print(f"version {decision.version}: {whose}{after}", flush=True)
