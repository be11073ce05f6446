"""What crosses between islands: nothing on the steps between, and less in all."""

import logging

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers.outer.fragments import fragments_of
from tests import harness, models

SCALARS = 8  # bytes: a loss of each step, and no more than another number


def rows_between_islands(make, mesh):
    """The collectives over the first axis of a mesh, which islands are made along."""
    shape, layout, dims = harness.MESHES[mesh]
    (feed,) = models.mlp_batches(1)
    made = harness.built("simd", shape, layout, models.train(make, dims), feed)
    axis = shape.split(":")[0]
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
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


def test_between_outer_steps_only_numbers_are_sent_between_islands():
    for mesh in ("4", "2x2x2"):
        bare = sent(rows_between_islands(models.OPTIMIZERS["adam"], mesh))
        every_step, rounds = of_steps_and_rounds(outer(mesh, 36))
        assert sent(every_step) <= SCALARS
        assert sent(rounds) > 4 * SCALARS
        # A step sends a 36th of what the bare optimizer sends, and numbers.
        assert sent(rounds) / 36 + sent(every_step) <= bare / 36 + SCALARS


def test_clipping_a_loss_scale_and_skipping_send_numbers_more():
    def inside(opt):
        return gs.LossScaleOptimizer(gs.ClipByGlobalNormOptimizer(opt, 1.0))

    every_step, _ = of_steps_and_rounds(outer("4", 4, "sgd", inside))
    assert SCALARS < sent(every_step) + SCALARS <= 4 * SCALARS
    plain, skipping = (outer("4", 4, "sgd", leave_out_not_finite=leave) for leave in (False, True))
    # Of each outer step: which island is skipped.
    assert sent(skipping) - sent(plain) <= 4 * SCALARS


def test_fragments_send_the_same_in_parts():
    whole = of_steps_and_rounds(outer("4", 4, "sgd"))[1]
    parts = of_steps_and_rounds(outer("4", 4, "sgd", fragments=4))[1]
    branches = {row.branches: [] for row in parts}
    for row in parts:
        branches[row.branches].append(row)
    sizes = sorted(map(sent, branches.values()))
    assert sizes == [4 * 1, 4 * 1, 4 * 8, 4 * 48]  # float32, a variable each
    assert sum(sizes) == sent(whole)


def test_a_variable_that_is_larger_than_a_share_is_said_once(caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    sizes = {"embedding": 60, "layer_0/w": 20, "layer_1/w": 20}
    variables = [
        mtf.get_variable(mesh, name, mtf.Shape([mtf.Dimension("d", n)])).operation
        for name, n in sizes.items()
    ]
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        assert [len(some) for some in fragments_of(variables, 2)] == [1, 2]
        assert not caplog.records  # 60 of 100 is about a half
        for _ in range(2):
            fragments_of(variables, 3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "sends 60% of all values between islands and not 33%" in line
    assert "'embedding' has 60% of them" in line


def test_layers_are_strided_and_no_set_is_larger_than_its_share():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("d", 6)])

    def variables(names):
        return [mtf.get_variable(mesh, name, shape).operation for name in names]

    layers = variables([f"layer_{i:03}/{name}" for i in range(8) for name in ("a", "b")])
    sets = fragments_of(layers, 4)
    numbers = [sorted({int(v.name[6:9]) for v in some}) for some in sets]
    assert numbers == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for others, count in ((["embedding", "softmax"], 2), (["embed", "x", "y", "z"], 4)):
        sets = fragments_of(layers + variables(others), count)
        assert {len(some) for some in sets} == {(16 + len(others)) // count}
        assert len({v for some in sets for v in some}) == 16 + len(others)
