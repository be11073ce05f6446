"""The divisions that `verify` tries: ways to divide the same training over cores."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

from mtf_gradsync.extension import SyncReplicasOptimizer, mtf
from mtf_gradsync.runtimes._common import mesh_text
from mtf_gradsync.runtimes.sessions import RuntimeName, available_runtimes
from mtf_gradsync.tools.verification.recorded_program import Changes, RecordedProgram


@dataclasses.dataclass(frozen=True)
class Division:
    """A way to divide a program's training over cores.

    Attributes:
      name: the name in the table of results.
      mesh_shape: Mesh-TF's mesh shape.
      layout: Mesh-TF's layout rules.
      runtime: the name of the runtime that runs the program.
      changes: changes of the program's stack of wrappers and of its model.
      params: pairs (name, value) of settings that replace the program's own.
      is_reference: whether this is the reference, with which all other divisions are compared.
      precision: the narrowest floating-point dtype in which the model is built, such as "float32";
        "" keeps the model's own dtypes.
    """

    name: str
    mesh_shape: str
    layout: str
    runtime: RuntimeName = "cpu_replicas"
    changes: Changes = dataclasses.field(default_factory=Changes)
    params: tuple[tuple[str, Any], ...] = ()
    is_reference: bool = False
    precision: str = ""

    @property
    def key(self) -> Any:
        """The key by which outcomes of divisions are cached: a tuple of all fields except the name.

        Divisions that differ only in name have the same key.
        """
        shape = mtf.convert_to_shape(self.mesh_shape).to_string
        params = tuple((name, repr(value)) for name, value in self.params)
        more = (self.precision, self.is_reference)
        return shape, self.layout, self.runtime, self.changes, params, *more


KINDS = ("mesh", "batch", "model", "order", "microbatches", "wrappers", "masked", "runtimes")
MICRO_STEPS = 2


def reference_division(base: Division) -> Division:
    """Returns the reference with which other divisions are compared: one core and no wrappers.

    The reference has the same layout, the same precision and the same changes of the model as
    `base`, the program's own division.
    """
    return dataclasses.replace(
        base,
        name="one core, unwrapped",
        mesh_shape=on_one_core(base.mesh_shape),
        runtime="placement_mesh",
        changes=base.changes._replace(unwrapped=True, micro_steps=1),
        is_reference=True,
    )


def on_one_core(mesh_shape: str) -> str:
    """Returns a mesh shape with the same axes, all of size 1, such as "batch:1;model:1"."""
    dims = mtf.convert_to_shape(mesh_shape).dims
    return mesh_text(mtf.Shape([mtf.Dimension(d.name, 1) for d in dims]))


def default_divisions(
    base: Division, recorded: RecordedProgram, kinds: Sequence[str] = KINDS, k_of_stack: int = 1
) -> list[Division]:
    """Returns the divisions that `verify` tries by default; leaves out those that do not fit.

    Each of the returned divisions differs from the program's own division in one respect, such as
    the mesh shape, the runtime or one wrapper. A division does not fit if, for example, it adds
    microbatch steps to a program that accumulates gradients already.

    Args:
      base: the program's own division: the mesh, layout and runtime that the user configured.
      recorded: what was recorded when the program was built.
      kinds: the kinds of divisions to return, out of `KINDS`. The kind "mesh" adds nothing to the
        result, as it stands for the program's own division.
      k_of_stack: in how many steps the program accumulates gradients for one update; 1 if every
        step makes an update.
    """
    found = []
    dims = mtf.convert_to_shape(base.mesh_shape).dims
    size = mtf.convert_to_shape(base.mesh_shape).size

    def varied(name: str, **fields: Any) -> None:
        found.append(dataclasses.replace(base, name=name, **fields))

    def along(axis: str) -> str:
        sizes = [mtf.Dimension(d.name, size if d.name == axis else 1) for d in dims]
        return mesh_text(mtf.Shape(sizes))

    batch_axes = axes_of_batch(base.layout, recorded)
    if "batch" in kinds and len(dims) > 1:
        for axis in batch_axes[:1]:
            varied(f"all {size} cores along {axis}", mesh_shape=along(axis))
    if "model" in kinds:
        for axis in [d.name for d in dims if d.name not in batch_axes]:
            varied(f"all {size} cores along {axis}", mesh_shape=along(axis))
    if "order" in kinds and len(dims) > 1:
        varied("axes in the reverse order", mesh_shape=mesh_text(mtf.Shape(dims[::-1])))
    accumulates = k_of_stack > 1 or {*recorded.accumulating_wrappers} - {*base.changes.without}
    if "microbatches" in kinds and recorded.sees_gradients and not accumulates:
        changes = base.changes._replace(
            micro_steps=MICRO_STEPS, mesh=(base.mesh_shape, base.layout)
        )
        varied(f"{MICRO_STEPS} microbatch steps", changes=changes)
    if "wrappers" in kinds:
        for label in [x for x in recorded.stack if x not in base.changes.without]:
            varied(f"without {label}", changes=changes_without(base, label))
    shards = maskable_shards(recorded)
    if "masked" in kinds and shards > 1 and k_of_stack == 1:
        mask = tuple(number != shards - 1 for number in range(shards))
        varied(f"shard {shards - 1} masked", changes=base.changes._replace(mask=mask))
    if "runtimes" in kinds:
        for runtime in available_runtimes():
            if runtime != base.runtime:
                varied(f"on {runtime}", runtime=runtime)
    return found


def changes_without(base: Division, label: str) -> Changes:
    """Returns the changes that a division makes to the program, plus the removal of a wrapper.

    `base` is the division, and `label` is the wrapper's label in `RecordedProgram.stack`.
    """
    return base.changes._replace(without=(*base.changes.without, label))


def maskable_shards(recorded: RecordedProgram) -> int:
    """Returns how many shards the program has, if it can leave out the gradients of one of them.

    Only a program with a `SyncReplicasOptimizer` can leave out a shard; for other programs the
    result is 0. `recorded` has the program's wrappers.
    """
    for wrapper in recorded.wrappers.values():
        if isinstance(wrapper, SyncReplicasOptimizer) and wrapper.axes is not None:
            return wrapper.axes.num_shards
    return 0


def axes_of_batch(layout: str, recorded: RecordedProgram) -> list[str]:
    """Returns the names of the mesh axes over which a layout splits the program's batch.

    `recorded` has the names of the batch's dimensions.
    """
    names = recorded.batch_dims
    rules = mtf.convert_to_layout_rules(layout)
    pairs = sorted(rules._pairs)
    return [axis for name in names for dim, axis in pairs if dim == name]
