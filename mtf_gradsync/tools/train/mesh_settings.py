"""The mesh of a run: its shape, layout and devices, checked against each other and the model."""

from __future__ import annotations

import logging
import re
from typing import Any, Callable, Collection, NamedTuple, Sequence

from mtf_gradsync.extension import LayoutLike, MeshShapeLike, close_to, mtf, tf
from mtf_gradsync.runtimes._common import ConfigError, mesh_text
from mtf_gradsync.tools.train.config import check_callable

_logger = logging.getLogger(__name__)


class MeshSettings(NamedTuple):
    """A mesh, a device for each of its processors, and how many CPU devices the session needs.

    `mesh_impl` is called with a mesh shape, a layout and devices, and makes a placement mesh.
    `rules` are the layout's rules as pairs of a tensor dimension and a mesh dimension. `rules` is
    empty if the rules are not known.
    """

    shape: mtf.Shape
    layout: mtf.LayoutRules
    devices: list[str]
    num_cpu_devices: int
    mesh_impl: Callable[..., Any] = mtf.placement_mesh_impl.PlacementMeshImpl
    rules: Sequence[tuple[str, str]] = ()

    def placement_mesh(self, devices: Sequence[str] | None = None) -> Any:
        """Returns a new placement mesh on `devices`, by default on the devices of the settings."""
        return self.mesh_impl(self.shape, self.layout, list(devices or self.devices))

    def on_one_process(self) -> MeshSettings:
        """Returns the same mesh on devices of the calling process, not of the cluster's tasks."""
        devices = [
            tf.DeviceSpec.from_string(device).replace(job=None, replica=None, task=None).to_string()
            for device in self.devices
        ]
        return self._replace(devices=devices)

    def check_devices(self) -> None:
        """Raises ConfigError if the settings name a GPU that TensorFlow does not see.

        GPUs of other tasks of the cluster are not checked.
        """
        specs = map(tf.DeviceSpec.from_string, self.devices)
        wanted = [spec for spec in specs if spec.device_type == "GPU" and spec.job is None]
        there = len(tf.config.list_physical_devices("GPU")) if wanted else 0
        for spec in wanted:
            if (spec.device_index or 0) >= there:
                raise ConfigError(
                    f"train.run.mesh_devices names {spec.to_string()}, and TensorFlow "
                    f"{tf.__version__} sees {there or 'no'} GPU{'s' if there != 1 else ''} here. "
                    "Name devices that are there; without the binding the run is on virtual CPU "
                    "devices, or on the devices that jax has."
                )

    def num_parts(self, dimension: str) -> int:
        """Returns into how many parts the mesh splits the tensor dimension named `dimension`.

        The result is 1 for a dimension that no rule of the layout splits.
        """
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.shape, mtf.Dimension(dimension, 0))

    def check_splits(self, graph: mtf.Graph, inputs: Collection[str]) -> None:
        """Checks the layout against the dimensions of a model's tensors.

        `graph` is the model's mtf graph, and `inputs` are the names of the dimensions of its input
        features.

        Raises ConfigError for a tensor dimension that the mesh cannot split evenly. Also raises
        ConfigError for a rule that splits no variable and no input, if no other rule splits one
        over the same mesh dimension. The processors along this mesh dimension would then all
        compute the same, except that attention may split tensors of its own by the rule. Any other
        rule that splits no variable and no input is named in the log.
        """
        dims = sorted({dim for op in graph.operations for x in op.outputs for dim in x.shape.dims})
        variables = {dim.name for v in graph.all_variables for dim in v.shape.dims}
        given = sorted(variables.union(inputs))
        sizes = {axis.name: axis.size for axis in self.shape.dims}
        axes = {name: axis for name, axis in self.rules if axis in sizes}
        uneven = [dim for dim in dims if dim.size % self.num_parts(dim.name)]
        if uneven:
            over = {axes.get(dim.name, "?"): self.num_parts(dim.name) for dim in uneven}
            hint = "Change one of the two"
            if "vocab" in (dim.name for dim in uneven):
                parts = self.num_parts("vocab")
                hint += f"; Unitransformer.vocab_divisor = {parts} pads the vocabulary"
            raise ConfigError(
                f'train.run.mesh_shape = "{mesh_text(self.shape)}" splits by '
                f"{' and '.join(f'{axis}:{size}' for axis, size in over.items())}, which does not "
                f"divide {', '.join(f'{dim.name} = {dim.size}' for dim in uneven)} of the model "
                f"(train.run.layout_rules). {hint}."
            )
        for name, axis in self.rules:
            if name in given or axis not in sizes:
                continue
            close = close_to(name, given, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if sizes[axis] > 1 and not any(axes.get(one) == axis for one in given):
                raise ConfigError(
                    f"train.run.layout_rules: no variable and no input of this model has the "
                    f'dimension "{name}"{hint}, and no other rule splits a variable or an input '
                    f'over the {sizes[axis]} parts of the mesh dimension "{axis}": the parts would '
                    "all compute the same. Variables and inputs have the dimensions "
                    f"{', '.join(given)}."
                )
            _logger.info(
                "The layout rule %s:%s splits no variable and no input: none has this dimension%s",
                name, axis, hint,
            )  # fmt: skip


def resolve_mesh(
    mesh_shape: MeshShapeLike,
    layout_rules: LayoutLike,
    mesh_devices: Sequence[str] | None,
    mesh_impl: Callable[..., Any] | None = None,
) -> MeshSettings:
    """Returns the mesh that settings of a config describe.

    The arguments are values of the settings of the same names in `RunConfig`. `mesh_shape` and
    `layout_rules` are texts such as "batch:4;model:2" and "batch:batch". `mesh_devices` has a
    device for each processor; None stands for as many virtual CPU devices. `mesh_impl` is a
    function that makes the placement mesh; None stands for Mesh-TensorFlow's `PlacementMeshImpl`.
    The function raises ConfigError if a setting cannot be read, or if the settings do not fit
    together.
    """
    shape = _convert(mtf.convert_to_shape, "mesh_shape", mesh_shape, "batch:4;model:2")
    layout = read_layout(layout_rules)
    rules = _layout_pairs(layout_rules)
    _check_layout_rules(rules, shape)
    if mesh_devices is None:
        mesh_devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    if isinstance(mesh_devices, str) or len(mesh_devices) != shape.size:
        given = repr(mesh_devices) if isinstance(mesh_devices, str) else f"{len(mesh_devices)}"
        raise ConfigError(
            f"train.run.mesh_devices must list {shape.size} devices, one for each processor of "
            f'the mesh "{mesh_text(shape)}"; got {given}. Give None to run on '
            f"{shape.size} virtual CPU devices."
        )
    check_callable("mesh_impl", mesh_impl, "@placement_mesh_impl", optional=True)
    return MeshSettings(
        shape,
        layout,
        list(mesh_devices),
        _num_cpu_devices(mesh_devices),
        mesh_impl or mtf.placement_mesh_impl.PlacementMeshImpl,
        rules,
    )


def axes_of(mesh_shape: MeshShapeLike) -> list[str]:
    """Returns the names of a mesh's axes."""
    shape = _convert(mtf.convert_to_shape, "mesh_shape", mesh_shape, "batch:4;model:2")
    return [dim.name for dim in shape.dims]


def read_layout(layout_rules: LayoutLike) -> mtf.LayoutRules:
    """Returns layout rules as an object; raises ConfigError for rules that cannot be read."""
    example = "batch:batch;heads:model"
    return _convert(mtf.convert_to_layout_rules, "layout_rules", layout_rules, example)


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


def _check_layout_rules(rules: Sequence[tuple[str, str]], mesh_shape: Any) -> None:
    """Raises ConfigError for a rule with a misspelt mesh dimension; allows rules for other meshes.

    `rules` are pairs (tensor dimension, mesh dimension), and `mesh_shape` is an mtf.Shape. T5's
    layouts have rules for mesh dimensions that only other meshes have ("ensemble:ensemble"), and
    Mesh-TensorFlow ignores such rules. So a rule for a dimension that the mesh lacks counts as
    misspelt only if the mesh has a dimension larger than 1 without any rule. If the mesh has no
    such dimension, a line about the rule is logged, and no error is raised.
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
            f'{idle}. Take the rule "{tensor_dim}:{mesh_dim}" out, or give it such a dimension.'
        )
    for tensor_dim, mesh_dim in absent:
        _logger.info(
            "The layout rule %s:%s has no effect: the mesh has no such dimension.",
            tensor_dim,
            mesh_dim,
        )


def _layout_pairs(layout_rules: Any) -> list[tuple[str, str]]:
    """Returns layout rules as pairs (tensor dimension, mesh dimension) of names.

    `layout_rules` is a text such as "batch:batch;heads:model", or has pairs of names. The result is
    empty for an mtf.LayoutRules, which has no public list of its rules.
    """
    if isinstance(layout_rules, mtf.LayoutRules):
        return []
    if isinstance(layout_rules, str):
        rules = [rule for rule in re.split("[,;]", layout_rules) if rule]
        return [tuple(rule.split(":")) for rule in rules]
    return list(layout_rules)


def _num_cpu_devices(mesh_devices: Sequence[str]) -> int:
    """Returns how many CPU devices `mesh_devices` need: one more than the largest CPU number."""
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
