"""Which variables a model uses as matrices, and which of their dimensions are inputs."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.muon import Matrix, matrix_of

BATCH, D, HEADS, KV, FF, VOCAB, PLACES, EXPERTS = (
    mtf.Dimension(name, size)
    for name, size in [
        ("batch", 4), ("d", 6), ("heads", 2), ("kv", 3), ("ff", 5), ("vocab", 7), ("places", 8),
        ("experts", 2),
    ]
)  # fmt: skip


def model(x, get):
    """A model in the style of GPT programs; `get` makes a variable, `x` are tokens."""
    wte = get("wte", VOCAB, D)
    h = mtf.gather(wte, x, VOCAB) + mtf.gather(get("wpe", PLACES, D), x, PLACES)
    h += mtf.reduce_mean(
        mtf.broadcast(get("axial", PLACES, D), [BATCH, PLACES, D]), reduced_dim=PLACES
    )
    h = mtf.einsum([h, get("gain", D)], h.shape)
    q = mtf.einsum([h, get("q", D, HEADS, KV)], [BATCH, HEADS, KV])
    h += mtf.einsum([q, get("o", HEADS, KV, D)], [BATCH, D])
    renamed = mtf.rename_dimension(mtf.cast(get("fc", D, FF), tf.float32) * 0.5, "ff", "hidden")
    hidden = mtf.relu(mtf.einsum([h, renamed], reduced_dims=[D]))
    # As programs with matrices of outputs by inputs have it.
    h += mtf.einsum([hidden, mtf.rename_dimension(get("proj", D, FF), "ff", "hidden")], h.shape)
    masked = get("masked", FF, D) * mtf.ones(h.mesh, mtf.Shape([D, FF])) * get("mask", FF, D)
    masked *= mtf.rsqrt(mtf.reduce_sum(mtf.square(masked), reduced_dim=D) + 1.0)
    h += mtf.einsum([mtf.einsum([h, masked], [BATCH, FF]), masked], h.shape)
    of_experts = mtf.broadcast(h, [EXPERTS, BATCH, D])
    each = mtf.einsum([of_experts, get("wi", EXPERTS, D, FF)], [EXPERTS, BATCH, FF])
    h += mtf.einsum([mtf.relu(each), get("wo", EXPERTS, FF, D)], [BATCH, D])
    tied = mtf.einsum([h, wte], [BATCH, VOCAB])
    return mtf.reduce_mean(tied + mtf.einsum([h, get("linear_out", D, VOCAB)], [BATCH, VOCAB]))


def variables(in_loop):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")

    def get(name, *dims):
        return mtf.get_variable(mesh, name, mtf.Shape(dims))

    tokens = mtf.import_tf_tensor(mesh, tf.zeros([4], tf.int32), mtf.Shape([BATCH]))
    if in_loop:
        # With the reads outside, as Mesh-TF's loops have no variables made inside.
        model(tokens, get)
        made = {v.name: v for v in mesh.graph.trainable_variables}
        mesh.graph.operations[:] = [x for x in mesh.graph.operations if x in made.values()]
        mtf.serialize_training_step(
            {"x": tokens}, lambda f: {"loss": model(f["x"], lambda n, *_: made[n].value)}, BATCH, 1
        )
    else:
        loss = model(tokens, get)
        mtf.gradients([loss], [v.value for v in mesh.graph.trainable_variables])
    return {v.name: v for v in mesh.graph.trainable_variables}


MATRICES = {
    "q": Matrix((0,), (1, 2)),
    "o": Matrix((0, 1), (2,)),
    "fc": Matrix((0,), (1,)),
    "proj": Matrix((1,), (0,)),
    "masked": Matrix((1,), (0,)),
    "mask": Matrix((1,), (0,)),
    "wi": Matrix((1,), (2,), (0,)),
    "wo": Matrix((0, 1), (2,)),
}


@pytest.mark.parametrize("in_loop", [False, True])
def test_the_first_product_says_what_is_an_input(in_loop):
    with tf.Graph().as_default():
        made = variables(in_loop)
        assert {
            name: matrix_of(v) for name, v in made.items() if gs.is_hidden_matrix(v)
        } == MATRICES


def test_filters_of_convolutions_have_their_output_channels_as_outputs():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        places, channels = [mtf.Dimension(name, 4) for name in "abc"], mtf.Dimension("channels", 3)
        for count, convolve in ((2, mtf.layers.conv2d), (3, mtf.layers.conv3d)):
            image = mtf.get_variable(
                mesh, f"image_{count}", mtf.Shape([BATCH, *places[:count], channels])
            )
            convolve(image, D, name=f"conv_{count}")
        made = {v.name: v for v in mesh.graph.trainable_variables}
        assert {name: matrix_of(v) for name, v in made.items() if gs.is_hidden_matrix(v)} == {
            "conv_2/kernel": Matrix((0, 1, 2), (3,)),
            "conv_3/kernel": Matrix((0, 1, 2, 3), (4,)),
        }


def test_without_a_use_names_and_shapes_decide():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        made = {
            name: mtf.get_variable(mesh, name, mtf.Shape(dims)).operation
            for name, dims in {
                "ffn/wi": [D, FF],
                "ffn/bias": [FF],
                "shared/embedding": [VOCAB, D],
                "logits/kernel": [D, VOCAB],
            }.items()
        }
    assert [name for name, v in made.items() if gs.is_hidden_matrix(v)] == ["ffn/wi"]
    assert matrix_of(made["ffn/wi"]) == Matrix((0,), (1,))


def test_operations_that_an_error_takes_out_are_not_counted():
    graph = mtf.Graph()
    mesh, dims = mtf.Mesh(graph, "mesh"), [mtf.Dimension("hidden", 3), mtf.Dimension("model", 2)]
    with tf.Graph().as_default():
        w = mtf.get_variable(mesh, "w", dims).operation
        x = mtf.ones(mesh, mtf.Shape([mtf.Dimension("batch", 4), dims[1]]))
        before = len(graph.operations)
        for _ in range(20):
            mtf.ones(mesh, w.shape)
        assert matrix_of(w).inputs == (0,)
        del graph.operations[before:]
        mtf.einsum([x, w.value], mtf.Shape([x.shape[0], dims[0]]))
        assert matrix_of(w).inputs == (1,)
        # And others in their place, as many or more.
        del graph.operations[before:]
        y = mtf.ones(mesh, mtf.Shape([mtf.Dimension("batch", 4), dims[0]]))
        mtf.einsum([y, w.value], mtf.Shape([y.shape[0], dims[1]]))
        assert matrix_of(w).inputs == (0,)
