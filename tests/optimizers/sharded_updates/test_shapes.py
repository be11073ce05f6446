"""The dimensions along which variables and slots are split over the replicas."""

import re

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.sharded_variables import (
    saves_tiles,
    shape_of_part,
    shapes_of_split_slot,
    why_unsplit,
)

AXES = gs.ReplicaAxes("batch:4;model:2", "batch:batch;d_ff:model;experts:batch")
PAIR = gs.ReplicaAxes("batch:2", "batch:batch")
TWO = gs.ReplicaAxes("a:2;b:4", "outer:a;batch:b", ("outer", "batch"))


@pytest.mark.parametrize(
    ("axes", "shape", "part"),
    [
        (AXES, "d_model=8,d_ff=6", "batch=8,d_ff=6"),
        (AXES, "d_ff=6,d_model=8", "d_ff=6,batch=8"),
        (AXES, "odd=6,d_model=8", "odd=6,batch=8"),
        (AXES, "stack=8,d_model=8", "stack=8,batch=8"),
        (TWO, "x=8,y=6", "batch=8,outer=6"),
        (TWO, "x=6", "outer=6"),
        # With x along the columns of tiles it takes 8 of them, else 128 or more; a part of 64
        # columns would take 8, too, and one with 4 of y 4.
        (PAIR, "x=128,y=8,z=8", "x=128,batch=8,z=8"),
        (PAIR, "x=1024,y=8,z=8", "batch=1024,y=8,z=8"),
        (PAIR, "x=128,z=64", "x=128,batch=64"),
        # Parts of 4 rows take a tile as those of 8 do.
        (PAIR, "x=8,y=256", "x=8,batch=256"),
        (PAIR, "x=64,y=256", "batch=64,y=256"),
    ],
)
def test_the_dimension_whose_parts_take_the_fewest_tiles_gets_the_shard_dims_name(
    axes, shape, part
):
    assert shape_of_part(_shape(shape), axes, fixed_dims=["stack"]) == _shape(part)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("", "is a scalar"),
        ("odd=6", "has no unsplit dimension that 4 divides"),
        ("d_ff=8", "has no dimension that is not split already"),
        ("experts=4,d_ff=8,d_model=8", "is split over the replica axes already"),
        ("d_model=4", "has fewer than 5 elements"),
        ("stack=8", "knows .'stack'. by name"),
    ],
)
def test_the_reason_why_a_variable_is_not_split(shape, why):
    shape = _shape(shape)
    assert shape_of_part(shape, AXES, ["stack"], min_size=5) == shape
    assert re.search(why, why_unsplit(shape, AXES, ["stack"], min_size=5))


@pytest.mark.parametrize(
    ("full", "part", "saves"),
    [
        ((128, 256), (32, 256), True),  # 8 tiles for 32
        ((256, 128), (256, 32), False),  # a part is as large as the full matrix
        ((128, 64), (32, 64), False),  # the 128 lie along the tiles
        ((256, 512), (256, 128), True),
        ((512, 768), (512, 96), True),  # 1 tile for 6
        ((512, 192), (512, 48), True),  # 24 for 96, with the 512 along the columns of tiles
        ((8, 160), (8, 40), False),  # 1 for 2, where a quarter would save three quarters
        ((8, 160), (8, 80), True),  # 1 for 2, of two parts
        ((512, 64), (64, 64), True),  # 8 for 32, though all 8 parts take 64
        ((20, 128), (10, 128), False),  # 2 for 3, where a half would save half
        ((4096, 512), (4, 512), True),  # 4 for 2048, of which each is half empty
        ((8000, 128), (4000, 128), True),
        ((4096, 8, 128), (64, 8, 128), True),
        ((8, 64), (4, 64), False),
        ((128,), (32,), True),
    ],
)
def test_parts_that_save_tiles(full, part, saves):
    assert saves_tiles(full, part) is saves


def test_variables_whose_parts_save_no_tiles_are_not_split():
    def parts(opt, **kwargs):
        wrapper = gs.ShardedUpdateOptimizer(opt, axes=AXES, **kwargs)
        shapes = {"wi": "d_model=128,d_ff=512", "wo": "d_ff=512,d_model=128", "b": "d_model=128"}
        with tf.Graph().as_default():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            made = [mtf.get_variable(mesh, n, _shape(s)).operation for n, s in shapes.items()]
        return {v.name for v in made if wrapper.part_of(v) is not None}

    for opt in (
        mtf.optimize.AdafactorOptimizer(learning_rate=0.1, decay_rate=0.8),
        mtf.optimize.AdamWeightDecayOptimizer(0.1),
    ):
        assert parts(opt) == {"wi", "b"}
        assert parts(opt, min_size=128) == {"wi", "wo", "b"}


def test_they_are_split_where_the_step_has_nothing_else():
    opt = mtf.optimize.AdafactorOptimizer(learning_rate=0.1, decay_rate=0.8)
    wrapper = gs.ShardedUpdateOptimizer(opt, axes=AXES)
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        wo, more = (
            mtf.get_variable(mesh, name, _shape("d_ff=512,d_model=128")).operation
            for name in ("wo", "more")
        )
        assert wrapper.part_of(wo) is not None
        b = mtf.get_variable(mesh, "b", _shape("d_model=128")).operation
        assert wrapper.part_of(wo) is wrapper.part_of(more) is None
        assert wrapper.part_of(b) == _shape("batch=128")
        # A step says it by the variables with gradients; the next one splits them alike.
        wrapper.apply_grads([mtf.ones(mesh, wo.shape), None], [wo, b])
        assert wrapper.part_of(wo) == _shape("d_ff=512,batch=128")
        assert wrapper.part_of(more) is None
        wrapper.apply_grads([mtf.ones(mesh, v.shape) for v in (wo, b, more)], [wo, b, more])
        assert [wrapper.part_of(v) is None for v in (wo, b, more)] == [False, False, True]


def test_a_dimension_of_the_model_is_split_over_the_replicas_too():
    shapes = shapes_of_split_slot(_shape("layers=3,d_ff=16"), AXES)
    assert shapes.full == _shape("layers=3,d_ff=2,d_ff_batch=4,d_ff_rest=2")
    assert shapes.part == _shape("layers=3,d_ff=2,batch=4,d_ff_rest=2")
    assert shapes_of_split_slot(_shape("d_ff=12"), AXES) is None
    assert shapes_of_split_slot(_shape("d_ff=16"), AXES, min_size=17) is None


def _shape(text):
    pairs = [dim.split("=") for dim in text.split(",") if dim]
    return mtf.Shape([mtf.Dimension(name, int(size)) for name, size in pairs])
