"""The names of the core that runtimes, tools, and programs with their own wrappers may use.

Import-linter checks that runtimes and tools use only these names of the core. The page
``docs/guides/own_wrapper.md`` says which of the names a program with its own wrappers uses. Each
name loads its module when it is first used. So this package's command can read its arguments, and
processes can watch each other, without loading TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "ACCUMULATOR",
    "AVERAGE",
    "ESTIMATOR_AVAILABLE",
    "GATHERS",
    "ISLAND",
    "NOT_GIVEN",
    "PASSES_ON",
    "SLOTS_COLLECTION",
    "STAND_INS",
    "STATE_COLLECTION",
    "SUMS_NOT_KEPT",
    "TOGETHER_ATTR",
    "WATCHED",
    "AppliesGradients",
    "Beginnings",
    "ClipByGlobalNormOptimizer",
    "CommonArguments",
    "Description",
    "GradientAccumulationOptimizer",
    "GradientStrategy",
    "HeldSlices",
    "LayoutLike",
    "MeshShapeLike",
    "NoUpdateError",
    "OuterOptimizer",
    "ProgramWrites",
    "ReportsSkips",
    "SlotOwners",
    "StateNote",
    "StepPlan",
    "SyncReplicasOptimizer",
    "TrainOptimizerInterface",
    "UpdateCounters",
    "WeightsOfGradients",
    "Wrapper",
    "advance_step_after",
    "as_layout",
    "as_mesh_shape",
    "averages",
    "begin_anew",
    "check_flag",
    "check_whole_number",
    "close_to",
    "counted",
    "describe",
    "did_you_mean",
    "forget_mesh",
    "gated_update",
    "gradient_noise_scale",
    "in_sums_now",
    "is_advanced",
    "is_marked",
    "is_number",
    "is_simd",
    "is_whole_number",
    "keeps_outer_values",
    "late_configurable",
    "lazy_names",
    "load_configurables",
    "lowerings_of",
    "mean_loss",
    "mixed",
    "mtf",
    "needs_not_finite",
    "owner_of",
    "patch",
    "place_of",
    "placement_mesh_impl",
    "process_of",
    "rate_at",
    "ref_variables_explained",
    "reported",
    "schedules_updates",
    "settings_by_global_step",
    "skips_not_finite",
    "some_lines",
    "some_of",
    "split_by_shard",
    "stages_of",
    "tf",
    "updates_before",
    "walk",
    "warn_of_unmatched",
    "warn_once",
    "weight_now",
    "why_not",
    "without_frozen",
]

if TYPE_CHECKING:
    from mtf_gradsync._common import (
        check_flag,
        check_whole_number,
        close_to,
        counted,
        did_you_mean,
        is_number,
        is_whole_number,
        mixed,
        some_lines,
        some_of,
        walk,
        warn_of_unmatched,
        warn_once,
    )
    from mtf_gradsync._private.lazy import lazy_names
    from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, mtf, tf
    from mtf_gradsync._private.mesh_tensorflow import (
        forget_mesh,
    )
    from mtf_gradsync._private.patches import late_configurable, load_configurables, patch
    from mtf_gradsync._private.tensorflow import (
        GATHERS,
        PASSES_ON,
        TOGETHER_ATTR,
        advance_step_after,
    )
    from mtf_gradsync.compat_v1.opt_argument import NOT_GIVEN, AppliesGradients
    from mtf_gradsync.mesh.axes import (
        LayoutLike,
        MeshShapeLike,
        as_layout,
        as_mesh_shape,
        is_simd,
    )
    from mtf_gradsync.mesh.devices import place_of, process_of
    from mtf_gradsync.optimizers import (
        ClipByGlobalNormOptimizer,
        CommonArguments,
        GradientAccumulationOptimizer,
        NoUpdateError,
        OuterOptimizer,
        SyncReplicasOptimizer,
        Wrapper,
        gradient_noise_scale,
        reported,
        split_by_shard,
    )
    from mtf_gradsync.optimizers.average import AVERAGE
    from mtf_gradsync.optimizers.description import Description, describe
    from mtf_gradsync.optimizers.interface import TrainOptimizerInterface
    from mtf_gradsync.optimizers.outer_values import HeldSlices
    from mtf_gradsync.optimizers.pipeline.forms import without_frozen
    from mtf_gradsync.optimizers.pipeline.order import (
        averages,
        keeps_outer_values,
        needs_not_finite,
        schedules_updates,
        skips_not_finite,
        why_not,
    )
    from mtf_gradsync.optimizers.pipeline.stack import stages_of
    from mtf_gradsync.optimizers.pipeline.weights import WeightsOfGradients, mean_loss
    from mtf_gradsync.optimizers.schedules import (
        rate_at,
        settings_by_global_step,
        updates_before,
    )
    from mtf_gradsync.optimizers.skips import ReportsSkips
    from mtf_gradsync.optimizers.slots import SlotOwners, owner_of
    from mtf_gradsync.optimizers.state import (
        ACCUMULATOR,
        ISLAND,
        SLOTS_COLLECTION,
        STAND_INS,
        STATE_COLLECTION,
        SUMS_NOT_KEPT,
        Beginnings,
        StateNote,
        UpdateCounters,
        begin_anew,
        is_marked,
    )
    from mtf_gradsync.optimizers.step_reports import in_sums_now, weight_now
    from mtf_gradsync.reduce import GradientStrategy, placement_mesh_impl
    from mtf_gradsync.step.conditional import WATCHED
    from mtf_gradsync.step.plan import StepPlan
    from mtf_gradsync.step.writes import (
        ProgramWrites,
        gated_update,
        is_advanced,
        lowerings_of,
        ref_variables_explained,
    )
else:
    # Modules that need no TensorFlow come first, because a name is looked for in this order.
    _HOMES = (
        "mtf_gradsync._common",
        "mtf_gradsync._private.lazy",
        "mtf_gradsync._private.libraries",
        "mtf_gradsync._private.mesh_tensorflow",
        "mtf_gradsync._private.patches",
        "mtf_gradsync._private.tensorflow",
        "mtf_gradsync.compat_v1.opt_argument",
        "mtf_gradsync.mesh.axes",
        "mtf_gradsync.mesh.devices",
        "mtf_gradsync.optimizers",
        "mtf_gradsync.optimizers.average",
        "mtf_gradsync.optimizers.description",
        "mtf_gradsync.optimizers.interface",
        "mtf_gradsync.optimizers.outer_values",
        "mtf_gradsync.optimizers.pipeline.forms",
        "mtf_gradsync.optimizers.pipeline.order",
        "mtf_gradsync.optimizers.pipeline.stack",
        "mtf_gradsync.optimizers.pipeline.weights",
        "mtf_gradsync.optimizers.schedules",
        "mtf_gradsync.optimizers.skips",
        "mtf_gradsync.optimizers.slots",
        "mtf_gradsync.optimizers.state",
        "mtf_gradsync.optimizers.step_reports",
        "mtf_gradsync.reduce",
        "mtf_gradsync.step.conditional",
        "mtf_gradsync.step.plan",
        "mtf_gradsync.step.writes",
    )

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for home in map(importlib.import_module, _HOMES):
                if name in vars(home):
                    return globals().setdefault(name, vars(home)[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
