"""Islands that come and go: programs that train apart and meet in a folder.

Names are imported when they are first asked for: a merger needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtf_gradsync.tools.islands.folder import DamagedObjectError, Folder
    from mtf_gradsync.tools.islands.island import ElasticIslands, Island, IslandError, IslandHook
    from mtf_gradsync.tools.islands.journal import plot_status, read_status
    from mtf_gradsync.tools.islands.merger import (
        FolderTakenError,
        Merger,
        MergerError,
        Waiting,
        replay,
    )
    from mtf_gradsync.tools.islands.versions import MergeSettings

_MODULE_OF = {
    "DamagedObjectError": "folder",
    "ElasticIslands": "island",
    "Folder": "folder",
    "FolderTakenError": "merger",
    "Island": "island",
    "IslandError": "island",
    "IslandHook": "island",
    "MergeSettings": "versions",
    "Merger": "merger",
    "MergerError": "merger",
    "Waiting": "merger",
    "plot_status": "journal",
    "read_status": "journal",
    "replay": "merger",
}
__all__ = [
    "DamagedObjectError",
    "ElasticIslands",
    "Folder",
    "FolderTakenError",
    "Island",
    "IslandError",
    "IslandHook",
    "MergeSettings",
    "Merger",
    "MergerError",
    "Waiting",
    "plot_status",
    "read_status",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
