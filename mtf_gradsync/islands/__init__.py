"""Islands that come and go: programs that train apart and meet in a folder."""

from mtf_gradsync.islands.folder import DamagedObjectError, Folder
from mtf_gradsync.islands.island import Island, IslandError, IslandHook
from mtf_gradsync.islands.journal import plot_status, read_status
from mtf_gradsync.islands.merger import (
    FolderTakenError,
    Merger,
    MergerError,
    MergeSettings,
    Waiting,
    replay,
)

__all__ = [
    "DamagedObjectError",
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
