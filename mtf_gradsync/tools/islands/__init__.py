"""Islands: programs that train separately and exchange changes through a shared folder."""

from typing import TYPE_CHECKING

from mtf_gradsync.extension import lazy_names

if TYPE_CHECKING:
    from mtf_gradsync.tools.islands.changes import MergeSettings
    from mtf_gradsync.tools.islands.elastic import DataPart, ElasticIslands, IslandHook, claim_part
    from mtf_gradsync.tools.islands.exchange import IslandError
    from mtf_gradsync.tools.islands.folder import Folder
    from mtf_gradsync.tools.islands.island import Island
    from mtf_gradsync.tools.islands.journal import plot_status, read_status
    from mtf_gradsync.tools.islands.merger import FolderTakenError, Merger, MergerError, Waiting
    from mtf_gradsync.tools.islands.tensor_files import DamagedObjectError
    from mtf_gradsync.tools.islands.versions import replay
else:  # a type checker that saw `__getattr__` would take any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "DamagedObjectError": "mtf_gradsync.tools.islands.tensor_files",
            "DataPart": "mtf_gradsync.tools.islands.elastic",
            "ElasticIslands": "mtf_gradsync.tools.islands.elastic",
            "Folder": "mtf_gradsync.tools.islands.folder",
            "FolderTakenError": "mtf_gradsync.tools.islands.merger",
            "Island": "mtf_gradsync.tools.islands.island",
            "IslandError": "mtf_gradsync.tools.islands.exchange",
            "IslandHook": "mtf_gradsync.tools.islands.elastic",
            "MergeSettings": "mtf_gradsync.tools.islands.changes",
            "Merger": "mtf_gradsync.tools.islands.merger",
            "MergerError": "mtf_gradsync.tools.islands.merger",
            "Waiting": "mtf_gradsync.tools.islands.merger",
            "claim_part": "mtf_gradsync.tools.islands.elastic",
            "plot_status": "mtf_gradsync.tools.islands.journal",
            "read_status": "mtf_gradsync.tools.islands.journal",
            "replay": "mtf_gradsync.tools.islands.versions",
        },
    )

__all__ = [
    "DamagedObjectError",
    "DataPart",
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
    "claim_part",
    "plot_status",
    "read_status",
    "replay",
]
