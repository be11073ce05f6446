"""What crosses between islands: nothing on the steps between, and less in all."""

import itertools
import math

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.outer_values import fragments_of
from mtf_gradsync.optimizers.pipeline.strategy_state import VariablePiece, variable_of
from tests import harness, models

SCALARS = 8  # bytes: a loss of each step, and no more than another number


def rows_between_islands(make, mesh):
    """The collectives over the first axis of a mesh, which islands are made along."""
    shape, layout, dims = harness.MESHES[mesh]
    (feed,) = models.mlp_batches(1)
    made = harness.built("simd", shape, layout, models.train(make, dims), feed)
    axis = shape.split(":")[0]
    rows = made.collectives().rows
    return [row for row in rows if axis in row.group.split("+")]


def outer(mesh, inner_steps, opt="adam", inside=lambda opt: opt, **arguments):
    shape, layout, dims = harness.MESHES[mesh]

    def make():
        return gs.OuterOptimizer(
            inside(models.OPTIMIZERS[opt]()), inner_steps, mesh_shape=shape, layout=layout,
            batch_dims=dims, outer_dims=dims[:1], **arguments,
        )  # fmt: skip

    return rows_between_islands(make, mesh)


def sent(rows):
    return sum(row.bytes_per_step for row in rows)


def of_steps_and_rounds(rows):
    return [r for r in rows if not r.is_conditional], [r for r in rows if r.is_conditional]


@pytest.mark.slow
def test_between_outer_steps_only_numbers_are_sent_between_islands():
    for mesh in ("4", "2x2x2"):
        bare = sent(rows_between_islands(models.OPTIMIZERS["adam"], mesh))
        every_step, rounds = of_steps_and_rounds(outer(mesh, 36))
        assert sent(every_step) <= SCALARS
        assert sent(rounds) > 4 * SCALARS
        # A step sends a 36th of what the bare optimizer sends, and numbers.
        assert sent(rounds) / 36 + sent(every_step) <= bare / 36 + SCALARS


@pytest.mark.slow
def test_clipping_a_loss_scale_and_skipping_send_numbers_more():
    def inside(opt):
        return gs.LossScaleOptimizer(gs.ClipByGlobalNormOptimizer(opt, 1.0))

    every_step, _ = of_steps_and_rounds(outer("4", 4, "sgd", inside))
    assert SCALARS < sent(every_step) + SCALARS <= 4 * SCALARS
    plain, skipping = (outer("4", 4, "sgd", leave_out_not_finite=leave) for leave in (False, True))
    # Of each outer step: which island is skipped. Where some are, a branch sends their flags.
    skipping = [row for row in skipping if len(row.branches) < 2]
    assert sent(skipping) - sent(plain) <= 4 * SCALARS


@pytest.mark.parametrize("mesh", ["4", "2x2x2"])
@pytest.mark.slow
def test_the_largest_step_sends_no_more_than_its_share(mesh):
    whole = of_steps_and_rounds(outer(mesh, 3, "sgd"))[1]
    parts = of_steps_and_rounds(outer(mesh, 3, "sgd", fragments=3))[1]
    branches = {row.branches: [] for row in parts}
    for row in parts:
        branches[row.branches].append(row)
    sizes = [sent(branch) for branch in branches.values()]
    # float32: a third of 57 numbers on four cores, and of 29 of a slice.
    assert len(sizes) == 3
    assert max(sizes) == 4 * (19 if mesh == "4" else 10)
    assert sum(sizes) == sent(whole)


def variables_of(shapes):
    """Mesh variables of names and dimensions; the layout splits the dimension "split"."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with tf.Graph().as_default():
        return [
            mtf.get_variable(
                mesh, name, mtf.Shape(list(itertools.starmap(mtf.Dimension, dims)))
            ).operation
            for name, dims in shapes.items()
        ]


AXES = gs.ReplicaAxes("islands:2;model:2", "batch:islands;split:model")


def sent_of(fragments):
    """The numbers that a core sends in each fragment."""
    return [sum(math.prod(AXES.slice_shape(x.shape)) for x in some) for some in fragments]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_variables_of_any_sizes_are_cut_to_equal_shares(seed, by_rows):
    rng = np.random.RandomState(seed)
    names = [f"layer_{i}/w" for i in range(rng.randint(5))] + list("abcdef")
    shapes = {}
    for name in names:
        sizes = [int(n) for n in np.exp(rng.uniform(0, 5, rng.randint(4)))]
        shapes[name] = [(f"d{i}", n) for i, n in enumerate(sizes)]
        if sizes and rng.randint(2):
            shapes[name][rng.randint(len(sizes))] = ("split", 2 * rng.randint(1, 20))
    variables = variables_of(shapes)
    total = sum(math.prod(AXES.slice_shape(v.shape)) for v in variables)
    for count in (1, 2, 3, 5):
        fragments = fragments_of(variables, count, AXES, by_rows)
        pieces = [x for some in fragments for x in some if isinstance(x, VariablePiece)]
        row = max(map(row_length, variables))
        assert max(sent_of(fragments)) <= -(-total // count) + (row - 1 if by_rows else 0)
        if by_rows:
            assert all(
                x.shape.dims[-1].name == "_columns" for x in pieces if row_length(x.variable) > 1
            )
        # Each number is in one fragment.
        for variable in variables:
            found = [x for some in fragments for x in some if variable_of(x) is variable]
            if found != [variable]:
                ranges = sorted((x.start, x.stop) for x in found)
                size = math.prod(AXES.slice_shape(variable.shape))
                assert [0, *(b for _, b in ranges)] == [*(a for a, _ in ranges), size]


def row_length(variable):
    shape = AXES.slice_shape(variable.shape)
    return shape[-1] if len(shape) > 1 else 1


def test_layers_are_strided_and_a_large_variable_fills_the_fragments():
    layers = {f"layer_{i:03}/{name}": [("d", 6)] for i in range(8) for name in ("a", "b")}
    fragments = fragments_of(variables_of(layers), 4, AXES)
    numbers = [sorted({int(v.name[6:9]) for v in some}) for some in fragments]
    assert numbers == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for others, count in ((["embedding", "softmax"], 2), (["embed", "x", "y", "z"], 4)):
        shapes = {**layers, **{name: [("d", 6)] for name in others}}
        fragments = fragments_of(variables_of(shapes), count, AXES)
        assert {len(some) for some in fragments} == {(16 + len(others)) // count}
        assert len({v for some in fragments for v in some}) == 16 + len(others)
    # 60% of all numbers in one variable: three equal fragments, of layers as before.
    large = {"embedding": [("d", 144)], **layers}
    fragments = fragments_of(variables_of(large), 3, AXES)
    assert sent_of(fragments) == [80, 80, 80]
    for number, some in enumerate(fragments):
        assert {int(x.name[6:9]) % 3 for x in some if x.name != "embedding"} == {number}
