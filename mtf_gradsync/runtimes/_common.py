"""Names that runtimes and tools share: errors of a run, flags, files, the folder of configs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

if TYPE_CHECKING:
    from mtf_gradsync.extension import mtf


class ConfigError(ValueError):
    """The error of a setting that cannot work.

    The message of a `ConfigError` names the setting that cannot work, and a remedy. The command
    line prints the message without a traceback and exits with code 2.
    """


class TrainingError(RuntimeError):
    """The error of a well-configured run that cannot go on, for example with a loss of NaN."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message; its type's name if the message is empty.

    `error` is the exception.
    """
    # TensorFlow's sessions raise a second error, with many lines on where an operation was made.
    if type(error.__context__) is type(error):
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


ACCEPT_FLAG = "--accept_checkpoint_differences"
SKIP_FLAG = "--skip_damaged_checkpoint"
# The file of all settings that a run leaves in its directory.
CONFIG_FILE = "operative_config.gin"

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of this package (such as "xla") from its clone.

    This package is on no package index (such as PyPI), so it is installed from a clone.
    """
    clone = _PACKAGE_DIR.parent
    if (clone / "pyproject.toml").is_file():
        return f'pip install -e "{clone}[{extra}]"'
    return f'pip install ".[{extra}]" in a clone of mtf_gradsync'


def configs_dir() -> Path:
    """Returns the folder of the gin files that come with the package.

    An installed package has the gin files in ``mtf_gradsync/configs``. A checkout, or an editable
    installation of a checkout, has them in ``configs`` beside the package. Put the folder that this
    function returns on gin's search path (``gin.add_config_file_search_path(str(configs_dir()))``)
    to include gin files by name.

    Raises:
      FileNotFoundError: when the package was installed without its gin files.
    """
    candidates = (_PACKAGE_DIR / "configs", _PACKAGE_DIR.parent / "configs")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        "The gin files of mtf_gradsync are in none of "
        f"{', '.join(str(c) for c in candidates)}; reinstall the package with pip."
    )


def mesh_text(shape: mtf.Shape) -> str:
    """Returns a mesh's shape as users write it, such as "batch:4;model:2"."""
    return ";".join(f"{dim.name}:{dim.size}" for dim in shape.dims)


@contextlib.contextmanager
def pipe_to_child() -> Iterator[int]:
    """Yields the read end of a pipe, to be the standard input of a child process.

    The write end is closed when the block ends. A child that ends when its standard input does so
    does not outlive the block, even if an interrupt comes while the child is started.
    """
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def unused_path(path: Path) -> Path:
    """Returns `path` if nothing exists there, else the first free one of path.2, path.3, ..."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def write_text(path: Path, text: str) -> None:
    """Replaces the file `path` by one that has `text`.

    The file is replaced atomically: a killed process leaves the old or the new file.
    """
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file `path` by one that has `content` as JSON.

    The file is replaced atomically: a killed process leaves the old or the new file.
    """
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file `path` by one that has the bytes `content`.

    The file is replaced atomically: a killed process leaves the old or the new file. The file's
    folder is made if it is missing. Devices and pipes are written to, not replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        # /dev/null and pipes stay what they are.
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
