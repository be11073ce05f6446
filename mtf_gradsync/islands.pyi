# For type checkers and the site; at run time the name leads to the folder.
from mtf_gradsync.tools.islands import (
    DamagedObjectError as DamagedObjectError,
    DataPart as DataPart,
    ElasticIslands as ElasticIslands,
    Folder as Folder,
    FolderTakenError as FolderTakenError,
    Island as Island,
    IslandError as IslandError,
    IslandHook as IslandHook,
    MergeSettings as MergeSettings,
    Merger as Merger,
    MergerError as MergerError,
    Waiting as Waiting,
    claim_part as claim_part,
    plot_status as plot_status,
    read_status as read_status,
    replay as replay,
)
