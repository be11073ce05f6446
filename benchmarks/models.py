"""The two models that the tables measure, bare and wrapped, on any mesh."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import report, timing
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train.config import transformer_models

BARE, WRAPPED, FLOOR = "bare", "wrapped", "floor"
_STEPS_IN_A_ROW = {"dense": 4, "lm": 2}
# What T5-base binds besides its layers, mesh and data.
T5_BASE = """
d_model = 768
d_ff = 3072
num_heads = 12
d_kv = 64
train.run.model_type = "bitransformer"
transformer.make_bitransformer.encoder_name = "encoder"
transformer.make_bitransformer.decoder_name = "decoder"
encoder/transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense]
decoder/transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
EncDecAttention.num_heads = 12
EncDecAttention.key_value_size = 64
EncDecAttention.dropout_rate = 0.0
EncDecAttention.relative_attention_type = None
SelfAttention.relative_attention_type = "bias_shared"
SelfAttention.relative_attention_num_buckets = 32
transformer.Unitransformer.positional_embedding = False
transformer.Unitransformer.shared_embedding_and_softmax_weights = True
transformer.Bitransformer.shared_embedding = True
Unitransformer.max_length = 512
Unitransformer.vocab_divisor = 32128
"""


class Model(NamedTuple):
    """A model with its mesh, its optimizer and a batch.

    Attributes:
      name: short name for tables.
      mesh_shape: Mesh-TF's mesh shape.
      layout: Mesh-TF's layout rules.
      make_loss: builds the scalar loss from a mesh and the input tensor.
      make_optimizer: makes the Mesh-TF optimizer.
      batch: the input of every step.
    """

    name: str
    mesh_shape: str
    layout: str
    make_loss: Callable[[mtf.Mesh, tf.Tensor], mtf.Tensor]
    make_optimizer: Callable[[], Any]
    batch: np.ndarray


class Program(NamedTuple):
    """A training step of a model, built and lowered.

    Attributes:
      graph: the tf graph.
      x: placeholder of the batch.
      loss: the loss before the step.
      update: makes the step.
      lowering: the mtf lowering.
      grads: the gradients as `mtf.gradients` returned them.
      parameters: how many numbers are trained.
      seconds: processor time from the empty graph to the lowered step. Building waits for
        nothing, and unlike the clock this leaves out what else runs on the machine.
    """

    graph: tf.Graph
    x: tf.Tensor
    loss: tf.Tensor
    update: tf.Operation
    lowering: mtf.Lowering
    grads: list[mtf.Tensor]
    parameters: int
    seconds: float


def dense(layers: int = 40, width: int = 64, batch: int = 64) -> Model:
    """Layers of one weight matrix and one bias: many small gradients. Adam, mesh of 8."""
    rng = np.random.RandomState(0)
    values = [(rng.randn(width, width) / np.sqrt(width)).astype("f") for _ in range(layers)]

    def make_loss(mesh: mtf.Mesh, x: tf.Tensor) -> mtf.Tensor:
        batch_dim = mtf.Dimension("batch", batch)
        # Two names, because no tensor can have a dimension twice.
        dims = [mtf.Dimension("even", width), mtf.Dimension("odd", width)]
        h = mtf.import_tf_tensor(mesh, x, mtf.Shape([batch_dim, dims[0]]))
        for number, value in enumerate(values):
            dim_in, dim_out = dims[number % 2], dims[(number + 1) % 2]
            w = mtf.get_variable(
                mesh, f"w{number}", [dim_in, dim_out], initializer=tf.constant_initializer(value)
            )
            b = mtf.get_variable(mesh, f"b{number}", [dim_out], initializer=tf.zeros_initializer())
            h = mtf.tanh(mtf.einsum([h, w], [batch_dim, dim_out]) + b)
        return mtf.reduce_mean(mtf.square(h))

    return Model(
        name="dense",
        mesh_shape="all:8",
        layout="batch:all",
        make_loss=make_loss,
        make_optimizer=lambda: mtf.optimize.AdamWeightDecayOptimizer(1e-3),
        batch=rng.randn(batch, width).astype("f"),
    )


def lm(
    layers: int = 4,
    d_model: int = 128,
    batch: int = 16,
    length: int = 64,
    mesh_shape: str = "batch:4;model:2",
    layout: str = "batch:batch;d_ff:model;heads:model;vocab:model",
    scaled_embedding: bool = False,
    dtype: mtf.VariableDType | None = None,
) -> Model:
    """A decoder-only transformer, batch and model parallel, 4x2 by default. Adafactor.

    Args:
      layers: the number of attention layers, and of feed-forward layers.
      d_model: the width.
      batch: sequences in a batch.
      length: bytes in a sequence.
      mesh_shape: Mesh-TF's mesh shape.
      layout: Mesh-TF's layout rules.
      scaled_embedding: whether the embedding, which makes the logits too, begins as small as a
        classifier's weights. Mesh-TF's default begins at 1, with which Adam learns more slowly.
      dtype: the dtypes of variables; None for float32.

    Returns:
      The model.
    """
    vocab_size, dtypes = 256, dtype or mtf.VariableDType()

    def make_loss(mesh: mtf.Mesh, x: tf.Tensor) -> mtf.Tensor:
        transformer = transformer_models()
        from mesh_tensorflow.transformer import transformer_layers

        sublayers = []
        for _ in range(layers):
            sublayers += [
                transformer_layers.SelfAttention(
                    num_heads=4, key_value_size=d_model // 4, dropout_rate=0.0
                ),
                transformer_layers.DenseReluDense(hidden_size=4 * d_model, dropout_rate=0.0),
            ]
        # Variables are named after layers: layers without names would share them.
        for number, sublayer in enumerate(sublayers):
            sublayer.set_name(f"layer_{number:03d}")
        stack = transformer.LayerStack(
            sublayers,
            sublayers_initial=[transformer.sublayer_dropout],
            sublayers_per_layer=[
                transformer.sublayer_rms_norm,
                transformer.sublayer_call_layer,
                transformer.sublayer_dropout,
                transformer.sublayer_residual,
            ],
            sublayers_final=[transformer.sublayer_rms_norm, transformer.sublayer_dropout],
        )
        model = transformer.Unitransformer(
            layer_stack=stack,
            d_model=d_model,
            input_vocab_size=vocab_size,
            output_vocab_size=vocab_size,
            autoregressive=True,
            max_length=length,
            shared_embedding_and_softmax_weights=True,
            layout=layout,
            mesh_shape=mesh_shape,
            loss_denominator=batch * length,
        )
        shape = mtf.Shape([mtf.Dimension("batch", batch), mtf.Dimension("length", length)])
        targets = mtf.import_fully_replicated(mesh, x, shape)
        with tf.variable_scope(model.name):
            embedding = transformer.VocabEmbedding(
                mesh,
                model.input_vocab_dim,
                model.model_dim,
                dtypes,
                name="embedding",
                ensemble_dim=None,
                scale_variable_like_classifier_weights=scaled_embedding,
            )
        _, loss = model.call_simple(
            inputs=transformer.autoregressive_inputs(targets),
            targets=targets,
            compute_loss=True,
            mode="train",
            variable_dtype=dtypes,
            shared_params={"embedding": embedding},
        )
        return loss

    return Model(
        name="lm",
        mesh_shape=mesh_shape,
        layout=layout,
        make_loss=make_loss,
        make_optimizer=lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.01),
        batch=np.random.RandomState(1).randint(1, vocab_size, (batch, length)).astype("i"),
    )


def models(quick: bool) -> list[Model]:
    """Both models; quick: small ones that only show that the tables work."""
    if quick:
        return [dense(layers=6, width=16), lm(layers=1, d_model=32, length=16)]
    return [dense(), lm()]


def placement_mesh(
    model: Model, mesh_impl: Callable[..., Any] = mtf.placement_mesh_impl.PlacementMeshImpl
) -> mtf.placement_mesh_impl.PlacementMeshImpl:
    """The model's mesh over virtual CPU devices, Mesh-TF's or another kind of placement mesh."""
    shape = mtf.convert_to_shape(model.mesh_shape)
    return mesh_impl(
        shape,
        mtf.convert_to_layout_rules(model.layout),
        [f"/device:CPU:{i}" for i in range(shape.size)],
    )


def build(
    model: Model,
    variant: str,
    mesh_block: Callable[[], Any] | None = None,
    reducer: Any = None,
    autostack: bool = True,
    more: Callable[[Any], tuple[list[mtf.Operation], list[mtf.Tensor]]] | None = None,
) -> Program:
    """Builds and lowers a training step in a graph of its own.

    Args:
      model: the model.
      variant: `BARE` (Mesh-TF's optimizer), `WRAPPED` (in CrossShardOptimizer), or `FLOOR`
        (forward and backward alone: the gradients stay partial sums and nothing is updated).
      mesh_block: makes a context manager that gives the mesh to lower on, entered in the new
        graph after the placeholder was made; None lowers on `placement_mesh`.
      reducer: how the wrapper's gradients are reduced; None takes its default.
      autostack: whether Mesh-TF stacks variables of equal shape, its default.
      more: called with the optimizer once gradients were applied; gives operations to run with the
        step, and tensors to compute with it.

    Returns:
      The program.
    """
    block = mesh_block or (lambda: contextlib.nullcontext(placement_mesh(model)))
    with tf.Graph().as_default() as tf_graph:
        tf.set_random_seed(1)
        start = time.process_time()
        x = tf.placeholder(tf.as_dtype(model.batch.dtype), model.batch.shape, name="x")
        with block() as mesh_impl:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            loss = model.make_loss(mesh, x)
            variables = graph.trainable_variables
            grads = mtf.gradients([loss], [v.value for v in variables])
            operations: list[mtf.Operation] = []
            tensors: list[mtf.Tensor] = []
            if variant != FLOOR:
                optimizer = model.make_optimizer()
                if variant == WRAPPED:
                    optimizer = gs.CrossShardOptimizer(optimizer, reducer=reducer)
                operations = list(optimizer.apply_grads(grads, variables))
                if more is not None:
                    more_operations, tensors = more(optimizer)
                    operations += more_operations
            lowering = mtf.Lowering(graph, {mesh: mesh_impl}, autostack=autostack)
            tf_loss = lowering.export_to_tf_tensor(loss)
            if variant == FLOOR:
                update = tf.group(*_partial_sums(lowering, grads))
            else:
                exported = [lowering.export_to_tf_tensor(x) for x in tensors]
                lowered = [lowering.lowered_operation(op) for op in operations]
                update = tf.group(*lowered, *exported)
        seconds = time.process_time() - start
    parameters = sum(v.size for v in variables)
    return Program(tf_graph, x, tf_loss, update, lowering, grads, parameters, seconds)


def _partial_sums(lowering: mtf.Lowering, grads: list[mtf.Tensor]) -> list[tf.Operation]:
    """The operations of every processor's share of every gradient, before any all-reduce."""
    operations = []
    for grad in grads:
        lowered = lowering.tensors[grad]
        if isinstance(lowered, mtf.LazyAllreduceSum):
            lowered = lowered.laid_out_input
        operations += [x.op for x in lowered.to_laid_out_tensor().tensor_list]
    return operations


def session_config(model: Model, grappler: bool = True, **kwargs: Any) -> tf.ConfigProto:
    """The package's session configuration for a model's mesh.

    Args:
      model: the model.
      grappler: False runs the graph as it was built. Only then a floor can be measured:
        Grappler drops what nothing but control edges use.
      **kwargs: for `mtf_gradsync.session_config`.

    Returns:
      A ConfigProto.
    """
    size = mtf.convert_to_shape(model.mesh_shape).size
    config = gs.session_config(num_cpu_devices=size, **kwargs)
    config.graph_options.rewrite_options.disable_meta_optimizer = not grappler
    return config


@contextlib.contextmanager
def running(
    model: Model, program: Program, config: tf.ConfigProto
) -> Iterator[Callable[[], float]]:
    """Opens a session with initialized variables.

    Args:
      model: the model.
      program: a program of that model on a placement mesh.
      config: session configuration.

    Yields:
      A function that makes one step and returns the loss before it.
    """
    with program.graph.as_default():
        initialize = tf.global_variables_initializer()
        to_slices = program.lowering.copy_masters_to_slices()
    with tf.Session(graph=program.graph, config=config) as session:
        session.run(initialize)
        session.run(to_slices)
        run = session.make_callable([program.loss, program.update], feed_list=[program.x])
        yield lambda: run(model.batch)[0]


def time_steps(
    model: Model,
    programs: dict[str, Program],
    grappler: bool,
    options: report.Options,
) -> dict[str, list[float]]:
    """Seconds per step of programs of a model, in turns, in a session each.

    Args:
      model: the model.
      programs: by name; all but `FLOOR` have to train alike.
      grappler: as for `session_config`.
      options: has the number of rounds.

    Returns:
      For each program the seconds per step of each round.
    """
    config = session_config(model, grappler)
    with contextlib.ExitStack() as stack:
        steps = {
            name: stack.enter_context(running(model, program, config))
            for name, program in programs.items()
        }
        # The first steps are slow: TensorFlow places and rewrites the graph.
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        check_same_training({n: v for n, v in losses.items() if n != FLOOR})
        in_a_row = _STEPS_IN_A_ROW[model.name]
        return timing.interleave(steps, options.rounds, in_a_row, f"{model.name} step")


def check_same_training(losses: dict[str, list[float]], tolerance: float = 0.01) -> None:
    """Raises RuntimeError unless programs made the same losses, within a relative tolerance.

    Ratios of step times mean nothing if the programs compute different things. The tolerance
    leaves room for Mesh-TF's races.
    """
    first = next(iter(losses.values()))
    for name, values in losses.items():
        if not np.allclose(values, first, rtol=tolerance):
            raise RuntimeError(
                f"The programs train differently: {next(iter(losses))} has the losses {first}, "
                f"{name} {values}."
            )
