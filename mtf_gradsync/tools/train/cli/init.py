"""Copy an example config to start from.

Copies a gin file that comes with the package, for you to change and train. Without the name of a
gin file the command lists the gin files that the package has. It never overwrites a file. With
--text the copy trains on your text files, of which the last tenth is held out; the copy gets the
name of the first text file.

Examples:
  mtf-gradsync init
  mtf-gradsync init lm_cpu_mesh
  mtf-gradsync init lm_cpu_mesh my_model.gin
  mtf-gradsync init --text novel.txt letters.txt     (writes novel.gin)
  mtf-gradsync init lm_accumulate --text novel.txt
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from pathlib import Path
from typing import Collection, Sequence

from mtf_gradsync.extension import did_you_mean
from mtf_gradsync.runtimes._common import ConfigError, configs_dir
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.data.texts import check_length, read_files

_USAGE = "mtf-gradsync init [CONFIG [FILE]] [--text TEXT [TEXT ...]]"

_COMMAND = "mtf-gradsync train --gin_file="
# The config that --text takes by itself.
_OF_TEXT = "lm_cpu_mesh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync init`` to its parser."""
    parser.usage = _USAGE
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="which one; none lists them")
    parser.add_argument(
        "file", nargs="?", metavar="FILE",
        help="the copy (default: CONFIG.gin in this directory; with --text, TEXT.gin)",
    )  # fmt: skip
    parser.add_argument(
        "--text", nargs="+", metavar="TEXT", default=[],
        help=f"UTF-8 text files to train on (CONFIG: {_OF_TEXT})",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync init`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0. A config or file that cannot be copied raises ConfigError.
    """
    configs = _examples()
    files, after = _split_arguments(args.text, configs)
    named = [*(name for name in (args.config, args.file) if name is not None), *after]
    if files and (not named or (_is_gin_file(named[0]) and Path(named[0]).stem not in configs)):
        named = [_OF_TEXT, *named]
    if len(named) > 2:
        raise ConfigError(f"The command init takes one CONFIG and one FILE; got {', '.join(named)}")
    config, file = [*named, None, None][:2]
    if config is None:
        for name, text in configs.items():
            print(f"{name}\n    {_summary(text)}")
        return 0
    name = Path(config).stem
    if name not in configs:
        hint = did_you_mean(name, configs, most=1) or f"; there are {', '.join(configs)}"
        if Path(config).is_file() and not _is_gin_file(config):
            hint = f". To train on a text: mtf-gradsync init --text {shlex.quote(config)}"
        raise ConfigError(f"There is no config {config!r}{hint}")
    path = flags.output_path("FILE", file or f"{_name_of_run(files[0]) if files else name}.gin")
    assert path is not None
    command = f"{_COMMAND}{shlex.quote(str(path))}"
    text = configs[name].replace(f"{_COMMAND}configs/{name}.gin", command)
    what = f"a copy of {name}.gin"
    if files:
        what = f"{name}.gin with the text of {', '.join(files)}"
        text = _config_for_texts(text, name, command, files)
    try:
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as written:
            written.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; name another FILE") from None
    print(f"{path} is {what}. To train it:\n  {command}")
    return 0


def _is_gin_file(name: str) -> bool:
    return Path(name).suffix == ".gin"


def _split_arguments(
    given: Sequence[str], configs: Collection[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the arguments after --text into two lists: text files, and CONFIG and FILE.

    The first argument is always a text file. CONFIG is the first other argument that names a
    config: it ends in .gin, or it names no file on the disk and is spelled like one of `configs`,
    or almost so. CONFIG and all arguments after it are the second list. Without a CONFIG the second
    list is empty.
    """
    for at, name in enumerate(given):
        is_config = not Path(name).exists() and difflib.get_close_matches(name, configs, 1, 0.8)
        if at and (is_config or _is_gin_file(name)):
            return given[:at], given[at:]
    return given, []


def _name_of_run(text: str) -> str:
    """Returns a name for a run that trains on the text file named `text`: "novel" for a/novel.txt.

    Characters that are special to shells, gin or TensorFlow are replaced. If a config of the
    package has the same name, "_text" is added to the name of the run: the new config may include
    the package's config, and needs a name of its own.
    """
    name = re.sub(r"[^\w.-]+", "_", Path(text).stem).strip("_.-") or "text"
    return f"{name}_text" if (configs_dir() / f"{name}.gin").exists() else name


def _config_for_texts(config: str, name: str, command: str, files: Sequence[str]) -> str:
    """Returns the text of a config like `config` that trains on the text files `files`.

    `config` is the text of the package's config, and `name` is the name of the package's config.
    `command` is the command that trains by the new config; a comment at the beginning of the result
    shows it. Raises ConfigError if the text files `files` cannot be read as UTF-8 or are too short.
    """
    documents = read_files(files, "--text")
    included = "".join(_examples().values())
    (length,) = re.findall(r'^train\.run\.sequence_length = .*"targets": (\d+)', included, re.M)
    check_length(documents, 10, int(length))
    first, comment, rest = re.split(r"\n(#.*?\n\n)", config, maxsplit=1, flags=re.S)
    shown = ", ".join(Path(file).name for file in files)
    about = comment.split("#\n")[0].replace(f" of {_SHIPPED_TEXT}", "")
    paths = "".join(f"    {str(Path(file).absolute())!r},\n" for file in files)
    return (
        f"{first}\n# {name}.gin, trained on {shown}.\n{about}#\n#   {command}\n\n{rest}"
        f"\n# The text, in place of {_SHIPPED_TEXT}.\n"
        "train.run.train_dataset_fn = @text_files\n"
        f"train.run.eval_dataset_fn = @text_files\ntext_files.files = [\n{paths}]\n"
    )


_SHIPPED_TEXT = "Python's own documentation"


def _examples() -> dict[str, str]:
    """Returns the texts of the package's configs that can be trained as they are, by name."""
    files = sorted(configs_dir().glob("*.gin"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return {name: text for name, text in texts.items() if _COMMAND in text}


def _summary(text: str) -> str:
    """Returns the first sentences of the comment in a config's text, indented for a list."""
    lines = text.splitlines()[1:]
    comment = lines[: lines.index("#")] if "#" in lines else lines[:1]
    return "\n    ".join(line.lstrip("# ") for line in comment)
