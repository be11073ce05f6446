"""Checks what a run was given, before anything is built."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, Callable, Dict, NamedTuple, Sequence, Union

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.train.errors import ConfigError

_logger = logging.getLogger(__name__)

SequenceLength = Union[int, Dict[str, int]]
LearningRate = Union[None, float, Callable[..., Any]]


class MeshSettings(NamedTuple):
    """A mesh, and the devices that it stands on.

    Attributes:
      shape: mtf.Shape of the mesh.
      layout: mtf.LayoutRules from tensor dimensions to mesh dimensions.
      devices: a device string for each processor of the mesh.
      num_cpu_devices: how many CPU devices the session has to have.
      mesh_impl: makes a placement mesh of shape, layout and devices.
    """

    shape: Any
    layout: Any
    devices: list[str]
    num_cpu_devices: int
    mesh_impl: Callable[..., Any] = mtf.placement_mesh_impl.PlacementMeshImpl

    def placement_mesh(self, devices: Sequence[str] | None = None) -> Any:
        """Makes the placement mesh, on its own devices or on others."""
        return self.mesh_impl(self.shape, self.layout, list(devices or self.devices))

    def split(self, dimension: str) -> int:
        """Returns into how many parts the mesh splits tensor dimensions of this name."""
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.shape, mtf.Dimension(dimension, 0))


def resolve_mesh(
    mesh_shape: Any,
    layout_rules: Any,
    mesh_devices: Sequence[str] | None,
    mesh_impl: Callable[..., Any] | None = None,
) -> MeshSettings:
    """Checks the mesh, the layout and the devices against each other.

    Args:
      mesh_shape: an input to mtf.convert_to_shape, for example "batch:4;model:2".
      layout_rules: an input to mtf.convert_to_layout_rules, for example "batch:batch".
      mesh_devices: one device string per processor; None for as many virtual CPU devices.
      mesh_impl: makes a placement mesh of shape, layout and devices; None for Mesh-TF's.

    Returns:
      The settings in one form.

    Raises:
      ConfigError: if one of them is malformed or they do not fit together.
    """
    shape = _convert(mtf.convert_to_shape, "mesh_shape", mesh_shape, "batch:4;model:2")
    layout = _convert(
        mtf.convert_to_layout_rules, "layout_rules", layout_rules, "batch:batch;heads:model"
    )
    _check_rules(_layout_pairs(layout_rules), shape)
    if mesh_devices is None:
        mesh_devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    if isinstance(mesh_devices, str) or len(mesh_devices) != shape.size:
        given = repr(mesh_devices) if isinstance(mesh_devices, str) else f"{len(mesh_devices)}"
        raise ConfigError(
            f"train.run.mesh_devices must list {shape.size} devices, one for each processor of "
            f'the mesh "{_shape_text(shape)}"; got {given}. Leave it out (None) to run on '
            f"{shape.size} virtual CPU devices."
        )
    check_callable("mesh_impl", mesh_impl, "@placement_mesh_impl", optional=True)
    return MeshSettings(
        shape,
        layout,
        list(mesh_devices),
        _num_cpu_devices(mesh_devices),
        mesh_impl or mtf.placement_mesh_impl.PlacementMeshImpl,
    )


def _convert(convert: Callable[[Any], Any], name: str, value: Any, example: str) -> Any:
    try:
        converted = convert(value)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'train.run.{name} = {value!r} cannot be read; write it like "{example}" ({error})'
        ) from error
    if converted is None:
        raise ConfigError(f'train.run.{name} must be given, for example "{example}"')
    return converted


def _check_rules(rules: Sequence[tuple[str, str]], mesh_shape: Any) -> None:
    """Tells a misspelled mesh dimension from a rule that is kept for other meshes.

    T5's layouts name dimensions that most meshes lack ("ensemble:ensemble"), and Mesh-TensorFlow
    ignores such rules. It does so too when a name is misspelled, and then trains unsplit: a
    dimension of the mesh is left without any rule.
    """
    names = [dim.name for dim in mesh_shape.dims]
    absent = [(tensor_dim, mesh_dim) for tensor_dim, mesh_dim in rules if mesh_dim not in names]
    used = {mesh_dim for _, mesh_dim in rules}
    idle = [dim.name for dim in mesh_shape.dims if dim.size > 1 and dim.name not in used]
    if absent and idle:
        tensor_dim, mesh_dim = absent[0]
        raise ConfigError(
            f'train.run.layout_rules maps "{tensor_dim}" to the mesh dimension "{mesh_dim}", '
            f"which the mesh does not have: train.run.mesh_shape has {names}, and no rule uses "
            f'{idle}. Take the rule "{tensor_dim}:{mesh_dim}" out, or name one of those.'
        )
    for tensor_dim, mesh_dim in absent:
        _logger.info(
            "The layout rule %s:%s has no effect: the mesh has no such dimension.",
            tensor_dim,
            mesh_dim,
        )


def _layout_pairs(layout_rules: Any) -> list[tuple[str, str]]:
    """The rules as given; none for an mtf.LayoutRules, which does not tell them."""
    if isinstance(layout_rules, mtf.LayoutRules):
        return []
    if isinstance(layout_rules, str):
        rules = [rule for rule in re.split("[,;]", layout_rules) if rule]
        return [tuple(rule.split(":")) for rule in rules]
    return list(layout_rules)


def _shape_text(shape: Any) -> str:
    return ";".join(f"{dim.name}:{dim.size}" for dim in shape.dims)


def _num_cpu_devices(mesh_devices: Sequence[str]) -> int:
    """One more than the largest CPU number that a device string names."""
    highest = 0
    for device in mesh_devices:
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"train.run.mesh_devices names {device!r}, which is not a device; write it like "
                f'"cpu:0", "gpu:0" or "/job:worker/task:1/device:CPU:0" ({error})'
            ) from error
        if spec.device_type in (None, "CPU"):
            highest = max(highest, spec.device_index or 0)
    return highest + 1


def resolve_sequence_length(sequence_length: SequenceLength) -> dict[str, int]:
    """Returns the length of every feature.

    Raises:
      ConfigError: if it is neither a positive integer nor a dict of them with "targets".
    """
    if _is_count(sequence_length):
        return {"inputs": sequence_length, "targets": sequence_length}
    if (
        isinstance(sequence_length, dict)
        and "targets" in sequence_length
        and all(map(_is_count, sequence_length.values()))
    ):
        return dict(sequence_length)
    raise ConfigError(
        "train.run.sequence_length must be a positive integer or a dict such as "
        f'{{"inputs": 64, "targets": 64}}; got {sequence_length!r}'
    )


def resolve_batch_size(
    batch_size: int | tuple[str, int],
    sequence_length: dict[str, int],
    mesh: MeshSettings,
    outer_batch_size: int,
) -> int:
    """Returns the number of sequences in a global batch.

    Args:
      batch_size: that number, or a (method, value) pair as in
        ``mesh_tensorflow.transformer.utils.compute_batch_size``.
      sequence_length: length of every feature.
      mesh: the mesh; it splits the "batch" and "outer_batch" dimensions.
      outer_batch_size: size of the "outer_batch" dimension, 0 for none.

    Raises:
      ConfigError: if it has another form, or the mesh cannot split it evenly.
    """
    from mtf_gradsync.train.transformer import transformer_utils

    given = batch_size
    if not _is_count(batch_size):
        try:
            batch_size = transformer_utils().compute_batch_size(
                sequence_length, mesh.shape, mesh.layout, batch_size
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "train.run.batch_size must be a positive integer or a pair such as "
                f'("tokens_per_replica", 2048); got {given!r} ({error})'
            ) from error
    parts = mesh.split("batch")
    inner = batch_size // max(1, outer_batch_size)
    if inner * max(1, outer_batch_size) != batch_size or inner < 1 or inner % parts:
        outer = f" in {outer_batch_size} outer batches" if outer_batch_size else ""
        raise ConfigError(
            f"train.run.batch_size = {given!r} gives batches of {batch_size} sequences{outer}, "
            f"which the mesh cannot split evenly: train.run.layout_rules and "
            f'train.run.mesh_shape split "batch" into {parts} parts. Use a multiple of '
            f"{parts * max(1, outer_batch_size)}."
        )
    return batch_size


def resolve_learning_rate(
    learning_rate_schedule: LearningRate | list[Any], total_steps: int
) -> LearningRate:
    """Returns None, a number, or a function of the keyword argument ``step``.

    Args:
      learning_rate_schedule: None (the optimizer knows better), a number, a function of ``step``
        and ``total_train_steps``, or a list of numbers and functions to multiply.
      total_steps: what the schedule sees as the length of the run.

    Raises:
      ConfigError: if it is something else.
    """
    from mtf_gradsync.train.transformer import learning_rate_schedules

    factors = learning_rate_schedule
    if isinstance(factors, (list, tuple)) and all(callable(f) or _is_number(f) for f in factors):
        return functools.partial(
            learning_rate_schedules().product_learning_rate,
            total_train_steps=total_steps,
            factors=list(factors),
        )
    if callable(factors):
        return functools.partial(factors, total_train_steps=total_steps)
    if factors is None or _is_number(factors):
        return factors
    raise ConfigError(
        "train.run.learning_rate_schedule must be a number, a function such as "
        "@learning_rate_schedules.learning_rate_schedule_noam, a list of both to multiply, or "
        f"None; got {learning_rate_schedule!r}"
    )


def check_count(name: str, value: Any, optional: bool = False) -> None:
    """Checks that a binding of ``train.run`` is a positive integer.

    Raises:
      ConfigError: if it is not.
    """
    if (optional and value is None) or _is_count(value):
        return
    raise ConfigError(
        f"train.run.{name} must be a positive integer{' or None' if optional else ''}; "
        f"got {value!r}"
    )


def check_callable(name: str, value: Any, example: str, optional: bool = False) -> None:
    """Checks that a binding of ``train.run`` is a class or function.

    Raises:
      ConfigError: if it is not; a gin reference with parentheses is the usual reason.
    """
    if callable(value) or (optional and value is None):
        return
    raise ConfigError(
        f"train.run.{name} must be a class or function, written as a gin reference without "
        f"parentheses like {example}; got {value!r}"
    )


def check_vocabulary(vocabulary: Any) -> None:
    """Checks that a vocabulary, or an (inputs, targets) pair of them, can be used.

    Raises:
      ConfigError: if one lacks vocab_size, encode or decode.
    """
    pair = vocabulary if isinstance(vocabulary, tuple) else (vocabulary,)
    for one in pair:
        missing = [name for name in ("vocab_size", "encode", "decode") if not hasattr(one, name)]
        if missing or isinstance(one, type) or len(pair) > 2:
            raise ConfigError(
                "train.run.vocabulary must be an object with vocab_size, encode and decode (or an "
                "(inputs, targets) pair), written like @ByteVocabulary() with parentheses; got "
                f"{vocabulary!r}"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
