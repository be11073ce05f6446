"""The seven optimizers of TensorFlow, and a model that they train with and without a mesh."""

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf

train = tf.train
# Where a result is divided by a root, epsilon keeps it away from 0, for the sake of tolerances; and
# so that rounding of 1 - beta shows, two have what they have by default.
OPTIMIZERS = {
    "adam by default": lambda: train.AdamOptimizer(),
    "adadelta by default": lambda: train.AdadeltaOptimizer(rho=0.999),
    "sgd": lambda: train.GradientDescentOptimizer(0.05),
    "momentum": lambda: train.MomentumOptimizer(0.02, 0.9),
    "nesterov": lambda: train.MomentumOptimizer(0.02, 0.9, use_nesterov=True),
    "adagrad": lambda: train.AdagradOptimizer(0.1, initial_accumulator_value=0.3),
    "adam": lambda: train.AdamOptimizer(0.02, beta1=0.8, beta2=0.95, epsilon=1e-3),
    "rmsprop": lambda: train.RMSPropOptimizer(0.01, decay=0.8, momentum=0.5, epsilon=1e-3),
    "centered": lambda: train.RMSPropOptimizer(
        0.01, decay=0.8, momentum=0.5, epsilon=1e-2, centered=True
    ),
    "adadelta": lambda: train.AdadeltaOptimizer(1.0, rho=0.9, epsilon=1e-3),
    "ftrl": lambda: train.FtrlOptimizer(
        0.1,
        learning_rate_power=-0.6,
        initial_accumulator_value=0.2,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.1,
    ),
    "ftrl named": lambda: train.FtrlOptimizer(0.1, accum_name="sums", linear_name="line"),
    # Hyperparameters as tensors, as functions, and as a variable.
    "tensors": lambda: train.AdamOptimizer(
        tf.constant(0.02), tf.constant(0.8), epsilon=tf.constant(1e-3), name="Tensors"
    ),
    "functions": lambda: train.AdamOptimizer(
        lambda: 0.02, lambda: tf.constant(0.8), lambda: 0.95, lambda: 1e-3
    ),
    "decayed": lambda: train.MomentumOptimizer(
        train.exponential_decay(0.05, train.get_or_create_global_step(), 10, 0.5), lambda: 0.9
    ),
}
BATCH, FEATURES, HIDDEN = 8, 4, 6
# 50 steps, each a few float32 roundings of numbers around 1, which the loss's slope shrinks again.
STEPS = 50


def assert_close(actual, expected, steps=STEPS):
    """Compares variables after some steps."""
    assert set(actual) == set(expected)
    tolerance = steps * 16 * np.finfo(np.float32).eps
    for name, value in expected.items():
        # Of the largest number in it, as slots may be small and numbers in them cancel.
        atol = tolerance * np.abs(value).max()
        np.testing.assert_allclose(actual[name], value, rtol=tolerance, atol=atol, err_msg=name)


def batches(number=STEPS):
    """Inputs and targets, one batch a step."""
    random = np.random.RandomState(0)
    return [
        {
            "x": random.randn(BATCH, FEATURES).astype(np.float32),
            "y": random.randn(BATCH, HIDDEN).astype(np.float32),
        }
        for _ in range(number)
    ]


def initial():
    """Initial values of the variables."""
    random = np.random.RandomState(1)
    return {
        "model/w": random.randn(FEATURES, HIDDEN).astype(np.float32),
        "model/b": random.randn(HIDDEN).astype(np.float32),
    }


def mesh_model(mesh, inputs):
    """The model on a mesh: its loss and variables."""
    dims = {
        "batch": mtf.Dimension("batch", BATCH),
        "features": mtf.Dimension("features", FEATURES),
        "hidden": mtf.Dimension("hidden", HIDDEN),
    }

    def shape(*names):
        return mtf.Shape([dims[name] for name in names])

    x = mtf.import_tf_tensor(mesh, inputs["x"], shape("batch", "features"))
    y = mtf.import_tf_tensor(mesh, inputs["y"], shape("batch", "hidden"))
    constants = {name: tf.constant_initializer(value) for name, value in initial().items()}
    with tf.variable_scope("model"):
        w, b = (
            mtf.get_variable(mesh, name, shape(*names), initializer=constants[f"model/{name}"])
            for name, names in (("w", ["features", "hidden"]), ("b", ["hidden"]))
        )
    made = mtf.einsum([x, w], shape("batch", "hidden")) + b
    return mtf.reduce_mean(mtf.square(made - y)), [w.operation, b.operation]


def plain_model(inputs, use_resource=True):
    """The same without a mesh."""
    values = {name.split("/")[1]: value for name, value in initial().items()}
    with tf.variable_scope("model", use_resource=use_resource):
        w, b = (
            tf.get_variable(n, values[n].shape, initializer=tf.constant_initializer(values[n]))
            for n in ("w", "b")
        )
    loss = tf.reduce_mean(tf.square(tf.matmul(inputs["x"], w) + b - inputs["y"]))
    return loss, [w, b]


def plain_training(make, feeds, checkpoint=None, restore=None):
    """Trains without a mesh; returns all variables, and saves a checkpoint if asked."""
    with tf.Graph().as_default():
        inputs = {n: tf.placeholder(tf.float32, v.shape) for n, v in feeds[0].items()}
        loss, variables = plain_model(inputs)
        step = tf.train.get_or_create_global_step()
        update = make().minimize(loss, step, variables)
        masters = {v.op.name: v for v in tf.global_variables()}
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            for feed in feeds:
                session.run(update, {inputs[n]: v for n, v in feed.items()})
            if checkpoint:
                saver.save(session, checkpoint, write_meta_graph=False)
            return session.run(masters)
