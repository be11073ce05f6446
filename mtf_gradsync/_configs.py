"""Finds the folder of the gin files that come with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["configs_dir"]

_PACKAGE_DIR = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """Returns the folder of the gin files that come with the package.

    An installed package has them in ``mtf_gradsync/configs``; in a checkout, or an editable install
    of one, they are in ``configs`` beside the package. Put this folder on gin's search path
    (``gin.add_config_file_search_path(str(configs_dir()))``) to include them by name.

    Raises:
      FileNotFoundError: the package was installed without its gin files.
    """
    candidates = (_PACKAGE_DIR / "configs", _PACKAGE_DIR.parent / "configs")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        "The gin files of mtf_gradsync are in none of "
        f"{', '.join(str(c) for c in candidates)}; reinstall the package with pip."
    )
