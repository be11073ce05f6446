r"""Let the model of a run write.

Prints what the language model of a run writes after a prompt. The command uses the config that the
run left in its directory and the run's newest checkpoint, whatever runtime has made the checkpoint.
The run may be finished, stopped, or still going on.

Examples:
  mtf-gradsync sample --model_dir=runs/lm_cpu_mesh --prompt="The list of "
  mtf-gradsync sample --model_dir=runs/lm_cpu_mesh --prompt=import --temperature=0
  mtf-gradsync sample --model_dir=runs/mine --prompt=a --gin_param="train.run.mesh_devices = None"
  mtf-gradsync sample --model_dir=runs/mine --prompt=a \
      --gin_param="train.run.evaluate_with_averages = True"

Every token that is written takes a pass of the whole model, so this command is for a look at what a
model has learned, not for serving the model to users.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync sample`` to its parser."""
    parser.add_argument("--model_dir", required=True, metavar="DIR", help="the run's directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    flags.add_number(parser, "--num_samples", "N", "how many texts", 1, flags.whole_number())
    flags.add_number(
        parser, "--max_tokens", "N", "how many tokens the model writes", 160, flags.whole_number()
    )
    temperature = "0 takes the most likely token, 1 draws from the model's distribution"
    flags.add_number(parser, "--temperature", "T", temperature, 0.5)
    parser.add_argument(
        "--keep_top_k",
        type=flags.whole_number(0),
        default=0,
        metavar="K",
        help="choose only among this many most likely tokens (default: 0, among all)",
    )
    flags.add_number(
        parser, "--seed", "N", "seed of the random numbers", 0, flags.whole_number(0, 1 << 32)
    )
    flags.add_json_argument(parser, "write the samples as JSON, too, with all characters")
    flags.add_gin_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync sample`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0. A run without a config or a checkpoint raises ConfigError.
    """
    json_file = flags.output_path("--json", args.json)
    config_file = flags.config_of_run(args.model_dir)
    try:
        args.prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # Python's arguments hold such bytes as surrogates
        raise ConfigError(f"--prompt={os.fsencode(args.prompt)!r} is no UTF-8 text") from error
    with loaded_config(args, [config_file]):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from mtf_gradsync.runtimes.starting import latest_checkpoint
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.model import resolve_job
        from mtf_gradsync.tools.train.sampling import Sampling, escape_controls, sample_after

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
    print("\n---\n".join(escape_controls(one.prompt + one.continuation) for one in samples))
    found = {"checkpoint": path, "samples": [one._asdict() for one in samples]}
    flags.write_output("--json", json_file, json.dumps(found, indent=2) + "\n")
    return 0
