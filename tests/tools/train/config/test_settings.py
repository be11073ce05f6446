import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import PlacementMeshImpl, placement_mesh_impl
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train import config, learning_rate, model
from mtf_gradsync.tools.train.data.vocabulary import ByteVocabulary
from mtf_gradsync.tools.train.mesh_settings import resolve_mesh

MESH = "batch:4;model:2"
LAYOUT = "batch:batch,d_ff:model"


def test_mesh_stands_on_virtual_cpu_devices_by_default():
    mesh = resolve_mesh(MESH, LAYOUT, None)
    assert mesh.devices == [f"/device:CPU:{i}" for i in range(8)]
    assert mesh.num_cpu_devices == 8
    assert (mesh.num_parts("batch"), mesh.num_parts("d_ff"), mesh.num_parts("heads")) == (4, 2, 1)


def test_shapes_and_rules_are_taken_as_objects_too():
    shape, layout = mtf.convert_to_shape(MESH), mtf.convert_to_layout_rules(LAYOUT)
    mesh = resolve_mesh(shape, layout, ["gpu:0"] * 8)
    assert mesh.num_cpu_devices == 1
    assert mesh.shape == shape


def test_mesh_is_mesh_tfs_or_the_one_that_is_asked_for():
    mesh = resolve_mesh(MESH, LAYOUT, None).placement_mesh()
    assert type(mesh) is mtf.placement_mesh_impl.PlacementMeshImpl
    asked = resolve_mesh(MESH, LAYOUT, None, placement_mesh_impl).placement_mesh()
    assert type(asked) is PlacementMeshImpl
    assert asked.devices == mesh.devices
    with pytest.raises(ConfigError, match="mesh_impl must be a class or function"):
        resolve_mesh(MESH, LAYOUT, None, asked)


@pytest.mark.parametrize(
    ("mesh_shape", "layout", "devices", "message"),
    [
        ("batch=4", LAYOUT, None, "mesh_shape = 'batch=4' cannot be read; write it like"),
        (None, LAYOUT, None, "mesh_shape must be given"),
        (MESH, 7, None, "layout_rules = 7 cannot be read"),
        (MESH, "batch:rows", None, 'maps "batch" to the mesh dimension "rows".*batch.*model'),
        (MESH, LAYOUT, ["cpu:0"] * 4, "mesh_devices must list 8 devices.*got 4"),
        (MESH, LAYOUT, "cpu:0", "mesh_devices must list 8 devices.*got 'cpu:0'"),
        ("batch:1", "batch:batch", ["/job:a/bogus:x"], "'/job:a/bogus:x', which is not a device"),
    ],
)
def test_mesh_errors_name_the_binding(mesh_shape, layout, devices, message):
    with pytest.raises(ConfigError, match=message):
        resolve_mesh(mesh_shape, layout, devices)


def test_rules_for_other_meshes_have_no_effect():
    mesh = resolve_mesh("batch:4", "ensemble:ensemble," + LAYOUT, None)
    assert mesh.shape == mtf.convert_to_shape("batch:4")


def test_layouts_are_checked_against_the_tensors_of_a_model(caplog):
    caplog.set_level("INFO", "mtf_gradsync.tools.train.mesh_settings")
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = [mtf.Dimension("vocab", 260), mtf.Dimension("d_ff", 12)]
    with tf.Graph().as_default():
        mtf.get_variable(mesh, "embedding", mtf.Shape(dims))
    mtf.zeros(mesh, mtf.Shape([mtf.Dimension("made", 4)]))

    def check(mesh_shape, layout):
        settings = resolve_mesh(mesh_shape, layout, None)
        caplog.clear()
        settings.check_splits(graph, ["batch"])
        return caplog.text

    assert not check("b:4;m:2", "batch:b,vocab:m,d_ff:m,d_kv:other")
    with pytest.raises(
        ConfigError, match=r"by m:3, which does not divide vocab = 260 of.*divisor = 3 p"
    ):
        check("b:4;m:3", "vocab:m,d_ff:m")
    with pytest.raises(
        ConfigError, match=r"by m:8, which does not divide d_ff = 12 of.*one of the two\.$"
    ):
        check("b:4;m:8", "d_ff:m")
    with pytest.raises(
        ConfigError, match=r'"d_fff" \(did you mean d_ff\?\), and no other rule .* 2 .*"m"'
    ):
        check("b:4;m:2", "batch:b,d_fff:m")
    # Other rules of the mesh dimension split something; a dimension of 1 part has nothing to split.
    for mesh_shape, layout in (("b:4;m:2", "d_fff:m,vocab:m"), ("b:4;m:1", "d_fff:m")):
        assert (
            "The layout rule d_fff:m splits no variable and no input: none has this dim"
            in check(mesh_shape, layout)
        )
    # Attention makes a dimension of any rule's name, and all else would be computed on each core.
    with pytest.raises(ConfigError, match=r'the dimension "made", and no other rule splits'):
        check("b:4;m:2", "made:m")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("autostack", 7, r"autostack must be True or False; got 7"),
        ("noise_scale", "yes", r"noise_scale must be True or False; got 'yes'"),
        ("reports", None, r"reports must be True or False; got None"),
        ("seed", 1.5, r"seed must be a whole number from 0 to 2147483647; got 1\.5"),
        ("seed", True, r"seed must be a whole number from 0 to 2147483647; got True"),
        ("seed", 2**31, r"seed must be a whole number from 0 to 2147483647; got 2147483648"),
        ("seed", -1, r"seed must be a whole number from 0 to 2147483647; got -1"),
    ],
)
def test_switches_and_seeds_are_checked(name, value, message):
    given = dict.fromkeys(
        ["vocabulary", "train_dataset_fn", "sequence_length", "mesh_shape", "layout_rules"], 0
    )
    run_config = config.RunConfig(**{**given, "train_steps": 1, "optimizer": None, name: value})
    with pytest.raises(ConfigError, match=f"train.run.{message}"):
        model.resolve_job(run_config)


def test_a_schedule_must_return_one_number():
    def vector(step, total_train_steps):
        return tf.cast(step, tf.float32) * tf.ones([2])

    rate = learning_rate.resolve_learning_rate([2.0, vector], 10)
    with tf.Graph().as_default():
        with pytest.raises(ConfigError, match=r"learning_rate_schedule.*shape \[2\].*one number"):
            learning_rate.rate_of_step(rate, tf.constant(3))


def test_batch_size_may_be_given_per_replica():
    mesh = resolve_mesh(MESH, LAYOUT, None)
    lengths = model.resolve_sequence_length(64)
    assert model.resolve_batch_size(("tokens_per_replica", 128), lengths, mesh, 0) == 8
    assert model.resolve_batch_size(24, lengths, mesh, 2) == 24


@pytest.mark.parametrize(
    ("batch_size", "outer", "message"),
    [
        (10, 0, "batches of 10 sequences, which the mesh cannot split.*4 parts. Use a multiple"),
        (4, 2, "in 2 outer batches.*a multiple of 8"),
        ("ten", 0, "must be a positive integer or a pair.*'ten'"),
        (("per_moon", 4), 0, "unknown method per_moon"),
        (0, 0, "got 0"),
    ],
)
def test_batch_size_errors(batch_size, outer, message):
    mesh = resolve_mesh(MESH, LAYOUT, None)
    with pytest.raises(ConfigError, match=f"train.run.batch_size.*{message}"):
        model.resolve_batch_size(batch_size, {"targets": 64}, mesh, outer)


@pytest.mark.parametrize("length", [0, "64", {"inputs": 64}, {"targets": -1}, True])
def test_sequence_length_errors(length):
    with pytest.raises(ConfigError, match="sequence_length must be a positive integer or a dict"):
        model.resolve_sequence_length(length)


def test_learning_rate_forms():
    def double(step, total_train_steps):
        return 2.0 * step / total_train_steps

    assert learning_rate.resolve_learning_rate(None, 10) is None
    assert learning_rate.resolve_learning_rate(0.1, 10) == 0.1
    assert learning_rate.resolve_learning_rate(double, 10)(step=5) == 1.0
    assert learning_rate.resolve_learning_rate([3.0, double], 10)(step=5) == 3.0
    with pytest.raises(ConfigError, match=r"learning_rate_schedule must be a number.*'fast'"):
        learning_rate.resolve_learning_rate("fast", 10)
    with pytest.raises(ConfigError, match="learning_rate_schedule"):
        learning_rate.resolve_learning_rate([0.1, "fast"], 10)
    for empty in ([], ()):
        with pytest.raises(ConfigError, match="learning_rate_schedule needs factors"):
            learning_rate.resolve_learning_rate(empty, 10)


def test_a_schedule_that_cannot_be_called_is_named():
    def of_step(step):
        return step

    def positional(now, total):
        return now / total

    takes = "train.run.learning_rate_schedule: a schedule takes the arguments step and total_train_"
    for schedule in (of_step, [0.1, of_step], positional):
        with pytest.raises(ConfigError, match=takes) as error:
            learning_rate.resolve_learning_rate(schedule, 10)
        assert "of_step(step): " in str(error.value) or "positional(now, total)" in str(error.value)
        assert " at 0x" not in str(error.value)
    # Factors are called by position.
    assert learning_rate.resolve_learning_rate([positional], 10)(step=5) == 0.5


@pytest.mark.parametrize("vocabulary", [ByteVocabulary, "bytes", (ByteVocabulary(), None), ()])
def test_vocabulary_errors(vocabulary):
    with pytest.raises(ConfigError, match=r"train.run.vocabulary.*@ByteVocabulary\(\)"):
        config.check_vocabulary(vocabulary)


def test_counts_and_references():
    config.check_positive("keep_checkpoint_max", None, optional=True)
    with pytest.raises(ConfigError, match=r"train.run.train_steps must be a positive integer; got"):
        config.check_positive("train_steps", 1.5)
    with pytest.raises(ConfigError, match="without parentheses like @CrossShardOptimizer"):
        config.check_callable("optimizer", object(), "@CrossShardOptimizer")
