"""``mtf-gradsync init``: copies an example config to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from mtf_gradsync._configs import configs_dir
from mtf_gradsync.runtimes.errors import ConfigError
from mtf_gradsync.train.cli.outputs import output_path

HELP = "copy an example config to start from"
DESCRIPTION = """\
Copies a gin file that comes with the package, to be changed and trained. Without a name it lists
what there is. A file that is there already stays as it is."""

EPILOG = """\
examples:
  mtf-gradsync init
  mtf-gradsync init lm_cpu_mesh
  mtf-gradsync init lm_cpu_mesh my_model.gin"""

_COMMAND = "mtf-gradsync train --gin_file="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="which one; none lists them")
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="the copy (default: CONFIG.gin in this directory)"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    texts = _examples()
    if args.config is None:
        for name, text in texts.items():
            print(f"{name}\n    {_summary(text)}")
        return 0
    name = Path(args.config).stem
    if name not in texts:
        raise ConfigError(f"There is no config {args.config!r}; there are {', '.join(texts)}")
    path = output_path("FILE", args.file or f"{name}.gin")
    text = texts[name].replace(f"{_COMMAND}configs/{name}.gin", f"{_COMMAND}{path}")
    assert path is not None
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; name another FILE") from None
    print(f"{path} is a copy of {name}.gin. To train it:\n  {_COMMAND}{path}")
    return 0


def _examples() -> dict[str, str]:
    """Returns the configs that can be trained as they are, by name."""
    files = sorted(configs_dir().glob("*.gin"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return {name: text for name, text in texts.items() if _COMMAND in text}


def _summary(text: str) -> str:
    """Returns the first sentences of a config's comment."""
    lines = text.splitlines()[1:]
    comment = lines[: lines.index("#")] if "#" in lines else lines[:1]
    return "\n    ".join(line.lstrip("# ") for line in comment)
