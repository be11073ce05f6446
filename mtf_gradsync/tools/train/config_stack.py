"""Reads the stack of optimizers from gin's bindings, so that `plan --best` can change it."""

from __future__ import annotations

from typing import Any, NamedTuple

import gin

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools._private.gin import Binding, bindings, short_name

#: Names of the wrappers that divide an update.
REDUCES, JOINS = "CrossShardOptimizer", "GradientAccumulationOptimizer"
SHARDS, OUTER = "ShardedUpdateOptimizer", "OuterOptimizer"
#: The parameter for the number of microbatch steps of an update.
MICROBATCHES = "backward_passes_per_step"
# Bindings of wrappers that the search sets, or that change no division.
_KNOWN = {
    REDUCES: {"opt", "mesh_shape", "layout"},
    JOINS: {
        *("opt", "backward_passes_per_step", "average_aggregated_gradients", "accumulate"),
        *("accumulator_dtype", "checkpoint_accumulators", "mesh_shape", "layout"),
    },
    SHARDS: {"opt", "mesh_shape", "layout"},
}
_AVERAGES, _SCALES = "AverageOptimizer", "LossScaleOptimizer"


class ConfigStack(NamedTuple):
    """The optimizers of a config's stack: gin references or class names, the outermost first.

    Attributes:
      scope: the gin scope of the optimizers, with a slash at its end; "" for none.
      dividing: class names of the wrappers that divide an update, which the search replaces.
      around: references to the wrappers that have to stand around a sharded update.
      inside: references to the other wrappers, and to the innermost optimizer.
      outside: class names of the wrappers around the accumulation, except those that keep averages.
        These wrappers get the gradients of each microbatch step, so the accumulation cannot be
        moved around them.
    """

    scope: str
    dividing: tuple[str, ...]
    around: tuple[str, ...]
    inside: tuple[str, ...]
    outside: tuple[str, ...]


def follow_macros(key: str, value: Any) -> tuple[str, Any]:
    """Returns where gin binds the value that a bound value stands for, and this value.

    If `value` is a macro, such as %K, the result is the macro's name, and the value of the macro.
    If this value is a macro, too, it is followed in turn. If `value` is no macro, the result is
    `key`, the name of the parameter that `value` is bound to, and `value`.
    """
    while isinstance(value, gin.config.ConfigurableReference) and str(value).startswith("%"):
        key = str(value)[1:]
        value = gin.query_parameter(f"{key}/gin.macro.value")
    return key, value


def bound_value(scope: str, selector: str, parameter: str) -> Any:
    """Returns the value that gin gives `parameter` in calls in `scope`; None without a binding.

    `selector` is the full name of the configurable that has the parameter. A binding in `scope`
    overrides one in a scope around `scope`. A macro is replaced by the value that it stands for.
    """
    there = bindings()
    parts = scope.split("/") if scope else []
    for end in range(len(parts), -1, -1):
        key = Binding("/".join(parts[:end]), selector, parameter)
        if key in there:
            return follow_macros("", there[key])[1]
    return None


def stack_of_config() -> ConfigStack:
    """Reads the stack of optimizers from gin's bindings.

    Raises ConfigError if ``plan --best`` cannot choose another division for the stack.
    """
    _, value = follow_macros("", gin.query_parameter("train.run.optimizer"))
    scope = None
    names: list[str] = []
    wrappers: list[str] = []
    while True:
        if not isinstance(value, gin.config.ConfigurableReference):
            raise ConfigError(
                "--best reads the stack of wrappers from gin's bindings, and "
                f"{wrappers[-1] + '.opt' if wrappers else 'train.run.optimizer'} is no reference "
                f"such as @AdafactorOptimizer; got {value!r}"
            )
        where, selector = value.config_key
        scope = where if scope is None else scope
        names.append(f"@{where}/{short_name(selector)}" if where and where != scope
                     else f"@{short_name(selector)}")  # fmt: skip
        following = bound_value(scope, selector, "opt")
        kind = selector.split(".")[-1]
        if following is None:
            break
        if len(names) > 20:
            raise ConfigError(
                f"The wrappers of the config form a circle, without end: {', '.join(names)}"
            )
        wrappers.append(kind)
        _check_wrapper(kind, scope, selector)
        value = following
    dividing = tuple(kind for kind in wrappers if kind in _KNOWN)
    kept = [name for name, kind in zip(names, [*wrappers, ""]) if kind not in _KNOWN]
    # A loss scale stands around a sharded update, and with it what is around the scale. Averages
    # are the same wherever they stand.
    last = max((i + 1 for i, name in enumerate(kept) if name.endswith(_SCALES)), default=0)
    around = tuple(name for name in kept[:last] if not name.endswith(_AVERAGES))
    inside = tuple(name for name in kept if name not in around)
    before = wrappers[: wrappers.index(JOINS)] if JOINS in wrappers else []
    outside = tuple(kind for kind in before if kind not in _KNOWN and kind != _AVERAGES)
    return ConfigStack(f"{scope}/" if scope else "", dividing, around, inside, outside)


def _check_wrapper(kind: str, scope: str, selector: str) -> None:
    if kind in ("SyncReplicasOptimizer", OUTER):
        raise ConfigError(
            f"--best divides an update anew, and {kind} decides by its own shards which "
            "gradients an update has: take it out of the config, or compare meshes by plan without "
            "--best" + ("; --outer_steps considers outer steps" if kind == OUTER else "")
        )
    if kind not in _KNOWN:
        return
    found = [key for key in bindings() if key.selector == selector and key.scope in ("", scope)]
    more = sorted({key.parameter for key in found} - _KNOWN[kind] - {"name"})
    if more:
        raise ConfigError(
            f"--best chooses {kind} and its settings, and the config binds "
            f"{kind}.{more[0]}, which changes what is trained or how: take it out, or compare "
            "meshes by plan without --best"
        )
