"""A program that is wrapped in a line, held against the reference."""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Iterator
from unittest import mock

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.programs.expected import expected, given, loss_of, on_one_core
from tests.programs.style import STEPS
from tests.programs.wrappers import WRAPPERS, wrap

# Of float32: some dozen layers' terms, with Adam's quotients of small numbers.
TOLERANCE = STEPS * 2.0**9 * np.finfo(np.float32).eps


def scope(styles, number):
    """Of the variables of one of the programs."""
    return f"program_{number}" if len(styles) > 1 else ""


def build(styles, names):
    """A `harness.Build` of a training step: programs on meshes of their own, by their wrappers."""

    def made(*meshes_and_inputs):
        *meshes, inputs = meshes_and_inputs
        operations, fetches = [], {}
        for number, (style, mesh) in enumerate(zip(styles, meshes)):
            with tf.variable_scope(scope(styles, number)):
                loss = loss_of(style, mesh, inputs)
                variables = [v for v in mesh.graph.trainable_variables if v.mesh is mesh]
                grads = style.gradients([loss], [v.value for v in variables])
                axes = gs.ReplicaAxes(style.shape, style.layout, style.batch_dims)
                inner, suffix = style.optimizer(mesh, inputs), f"_{number}" if number else ""
                optimizer = wrap(names[number], inner, axes, suffix)
                operations += style.apply(optimizer, grads, variables)
                fetches[f"loss {number}"] = loss
        return operations, fetches

    return made


@contextlib.contextmanager
def noted_sums() -> Iterator[dict[mtf.MeshImpl, collections.Counter]]:
    """Notes the bytes of each group of sums over the shards that placement meshes build."""
    noted: dict = collections.defaultdict(collections.Counter)
    fused, alone = gs.FusedAllReduce.all_reduce, mtf.placement_mesh_impl.PlacementMeshImpl.allreduce

    def note(mesh_impl, mesh_axes, tensors):
        if 0 in mesh_axes:
            sizes = [t.shape.num_elements() * t.dtype.size for t in tensors]
            noted[mesh_impl][f"sum {len(noted[mesh_impl])}"] = sum(sizes)

    def all_reduce(self, mesh_impl, values, groups):
        note(mesh_impl, groups.mesh_axes, [x.tensor_list[0] for x in values])
        return fused(self, mesh_impl, values, groups)

    def allreduce(self, x, mesh_axes, *args):
        note(self, mesh_axes, [x.tensor_list[0]])
        return alone(self, x, mesh_axes, *args)

    placement = mtf.placement_mesh_impl.PlacementMeshImpl
    with mock.patch.object(gs.FusedAllReduce, "all_reduce", all_reduce):
        with mock.patch.object(placement, "allreduce", allreduce):
            yield noted


def sums(made, mesh_impl, names=""):
    """Of a SIMD program: groups of sums over the shards that reach variables, and their bytes.

    Only of operations whose names begin with `names`.
    """
    rows = simd.list_collectives(made.program, mesh_impl, lowering=made.lowering).rows
    axis = mesh_impl.shape.dims[0].name
    groups = collections.Counter()
    for row in rows:
        if not row.name.startswith(names):
            continue
        is_sum = row.operation == "CrossReplicaSum" and row.variables
        if axis in row.group.split("+") and (is_sum or row.operation == "XlaReduceScatter"):
            groups[row.together or row.name] += row.bytes_per_core
    return groups


def gradient_bytes(lowering, mesh):
    """On a core, the bytes of each gradient that shards have parts of."""
    mesh_impl = lowering.mesh_to_impl[mesh]
    shapes = [v.shape for v in lowering.graph.trainable_variables if v.mesh is mesh]
    axes = [[mesh_impl.tensor_dimension_to_mesh_axis(d) for d in s.dims] for s in shapes]
    return [4 * mesh_impl.slice_size(s) for s, of in zip(shapes, axes) if 0 not in of]


def check_sums(found, wanted, flags, name):
    """Checks that a bare program has a sum for each gradient, and a wrapped one a group for all.

    Args:
      found: the groups of sums, in bytes.
      wanted: the bytes of each gradient, of some together.
      flags: the bytes of a number of each shard for each tensor that the wrapper checks.
      name: of the wrapper.
    """
    if name == "bare":
        # A sum or more for each.
        assert len(found) >= len(wanted)
        assert sum(found.values()) >= sum(wanted), found
        return
    # Parts of variables are scattered, those of the rest are summed.
    groups, others = (3 if "sharded" in WRAPPERS[name].parts else 1), []
    left = sum(wanted)
    for size in sorted(found.values(), reverse=True):
        if groups and size <= left:
            left, groups = left - size, groups - 1 if size < left else 0
        else:
            others.append(size)
    assert not left, (found, wanted)
    assert all(size <= flags for size in others), found


@functools.lru_cache(maxsize=1)
def built(styles, names, is_simd):
    """The program, and the sums noted meanwhile. Both runtimes of SIMD programs share it."""
    first, *more = styles
    with noted_sums() as noted:
        made = harness.built(
            "simd" if is_simd else "placement",
            first.shape,
            first.layout,
            build(styles, names),
            given(styles, names)[0],
            more_meshes=[(style.shape, style.layout) for style in more],
        )
    return made, dict(noted)


def check(styles, names, kind):
    """Trains the wrapped program, twice, and compares it with the reference.

    Args:
      styles: programs, each on a mesh of its own in one graph.
      names: of the wrapper of each.
      kind: as for `harness.run`.
    """
    made, noted = built(styles, names, kind != "placement")
    made, steps = made._replace(kind=kind), given(styles, names)
    if kind == "placement":
        assert "bare" in names or not made.races()
        first, second = made.runs(steps, 2)
    else:
        first, second = made.run(steps), made.run(steps)
    meshes = made.lowering.mesh_to_impl.items()
    for number, (style, name, (mesh, mesh_impl)) in enumerate(zip(styles, names, meshes)):
        wanted = gradient_bytes(made.lowering, mesh)
        if kind == "placement":
            found = noted.get(mesh_impl, {})
        else:
            found = sums(made, mesh_impl, scope(styles, number))
        checked = len(on_one_core(style)[0])
        if name == "islands":  # they check values, at most two slots of each, and the loss
            checked = 3 * checked + 1
        flags = 4 * style.shards * checked
        check_sums(found, wanted, flags, name)
        tolerance = TOLERANCE + (style.exchanged if kind != "placement" else 0.0)
        losses, variables = expected(style, name)
        got = [step[f"loss {number}"] for step in first.fetched]
        np.testing.assert_allclose(got, losses, rtol=tolerance)
        for key, value in variables.items():
            key = f"{scope(styles, number)}/{key}".lstrip("/")
            np.testing.assert_allclose(
                first.variables[key], value, rtol=tolerance, atol=tolerance, err_msg=key
            )
    for key, value in first.variables.items():
        assert np.array_equal(value, second.variables[key]), key
