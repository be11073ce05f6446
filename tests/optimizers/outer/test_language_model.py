"""A language model of islands, against bare programs and an outer step in numpy float64."""

from types import SimpleNamespace

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.mesh_settings import resolve_mesh
from mtf_gradsync.tools.train.model import MeshModel, ModelSettings
from tests import harness, models
from tests.sessions import session_of, train

ISLANDS, STEPS, ROUND, RATE, MOMENTUM = 2, 7, 3, 0.7, 0.5
BATCH, LENGTH, VOCAB = 4, 8, 32
OPTIMIZER = models.OPTIMIZERS["adafactor"]
BINDINGS = [
    "num_layers = 1",
    "d_model = 16",
    "d_ff = 32",
    "num_heads = 2",
    "d_kv = 8",
    f"Unitransformer.max_length = {LENGTH}",
    "utils.get_variable_dtype.master_dtype = 'float32'",
    "utils.get_variable_dtype.slice_dtype = 'float32'",
    "utils.get_variable_dtype.activation_dtype = 'float32'",
]


@pytest.fixture(autouse=True)
def layers():
    gin_files.load(["configs/unitransformer.gin"], BINDINGS)
    yield
    gin.clear_config()


def built(kind, shape, layout, batch, make):
    settings = ModelSettings(
        "lm", SimpleNamespace(vocab_size=VOCAB), resolve_mesh(shape, layout, None), batch, 0,
        {"targets": LENGTH}, True, 1,
    )  # fmt: skip

    def build(mesh, inputs):
        model = MeshModel(settings, mesh_impl=object())
        model.graph, model.mesh = mesh.graph, mesh
        _, loss = model(model.import_features(inputs), "train")
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        return make().apply_grads(grads, variables), {"loss": loss}

    return harness.built(kind, shape, layout, build, {"targets": np.zeros([batch, LENGTH], "i")})


def give(made, session, values):
    """Sets variables of a bare program; its slots stay."""
    session.variables()
    for variable in tf.global_variables():
        if variable.op.name in values:
            variable.load(values[variable.op.name], session._session)
    session.run(made.restore)


@pytest.mark.slow
def test_islands_of_a_language_model_are_bare_programs():
    rng = np.random.RandomState(0)
    feeds = [
        {"targets": rng.randint(1, VOCAB, [ISLANDS * BATCH, LENGTH]).astype("i")}
        for _ in range(STEPS)
    ]
    where = {"mesh_shape": f"all:{ISLANDS}", "layout": "batch:all"}
    islands = built(
        "simd", *where.values(), ISLANDS * BATCH,
        lambda: gs.OuterOptimizer(
            OPTIMIZER(), ROUND, outer_learning_rate=RATE, outer_momentum=MOMENTUM,
            **where,
        ),
    )  # fmt: skip
    with session_of(islands) as session:
        start = session.variables()
        train(islands, session, feeds)
        found = session.variables()
    bare = built("placement", *harness.ONE, BATCH, OPTIMIZER)
    names = [name for name in start if f"{name}/outer_momentum" in start]
    assert len(names) > 5
    outer = {name: start[name].astype(float) for name in names}
    velocity = {name: 0.0 * value for name, value in outer.items()}
    with session_of(bare) as first, session_of(bare) as second:
        alone = [first, second]
        for session in alone:
            give(bare, session, start)
        for step, feed in enumerate(feeds, 1):
            for session, part in zip(alone, np.split(feed["targets"], ISLANDS)):
                train(bare, session, [{"targets": part}])
            if step % ROUND:
                continue
            values = [session.variables() for session in alone]
            for name in names:
                difference = outer[name] - np.mean([x[name].astype(float) for x in values], 0)
                velocity[name] = MOMENTUM * velocity[name] + difference
                outer[name] = outer[name] - RATE * (difference + MOMENTUM * velocity[name])
            for session in alone:
                give(bare, session, {k: v.astype("f") for k, v in outer.items()})
        values = [session.variables() for session in alone]
    # As in test_outer_steps.py: each step rounds gradients and updates a few times.
    relative = STEPS * 32 * 2**-24
    for name in names:
        scale = np.abs(outer[name]).max()
        np.testing.assert_allclose(found[name], outer[name], rtol=0, atol=relative * scale)
        assert np.abs(outer[name] - start[name]).max() > 100 * relative * scale
    # Variables of the islands, and slots.
    assert len(values[0]) > len(names)
    for name in values[0]:
        for number, of_island in enumerate(values):
            scale = np.abs(of_island[name]).max()
            np.testing.assert_allclose(
                found[f"{name}/island"][number], of_island[name], rtol=0, atol=relative * scale
            )
    assert np.abs(np.diff(found[f"{names[0]}/island"], axis=0)).max() > 0
