"""Keeps training while one of four replicas gets no usable data, on a mesh of eight CPU devices.

For some steps replica 2's input pipeline delivers NaNs only. SyncReplicasOptimizer drops the
gradients of that replica and averages those of the others; CrossShardOptimizer sums all four, and
its weights are NaN from then on. Writes a picture of the losses and of who contributed.

    python examples/sync_replicas.py
"""

import argparse
import pathlib

import handwriting
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import trange

import mtf_gradsync as gs

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

MESH_SHAPE = "batch:4;model:2"
LAYOUT = "batch:batch;hidden:model"
AXES = gs.ReplicaAxes(MESH_SHAPE, LAYOUT)
REPLICA_BATCH = 16
DEAD = 2  # the replica that gets no data for a while
HELD_OUT = 360  # images
NAMES = ("all healthy", "one dead, SyncReplicas", "one dead, CrossShard")


def sync_replicas(opt):
    """Updates once three replicas or more have contributed."""
    return gs.SyncReplicasOptimizer(
        opt, replicas_to_aggregate=3, axes=AXES, max_steps_without_update=20
    )


def cross_shard(opt):
    """Updates by the mean over all replicas, even if one has no data."""
    return gs.CrossShardOptimizer(opt, axes=AXES)


class Trainer:
    """A network, its optimizer and a session."""

    def __init__(self, wrap):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self._build(wrap)

    def _build(self, wrap):
        (replica,) = AXES.shard_dims
        self.x = tf.placeholder(tf.float32, [replica.size, REPLICA_BATCH, 64])
        self.y = tf.placeholder(tf.int32, [replica.size, REPLICA_BATCH])
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        example, pixel = mtf.Dimension("example", REPLICA_BATCH), mtf.Dimension("pixel", 64)
        hidden, digit = mtf.Dimension("hidden", 128), mtf.Dimension("digit", 10)
        images = mtf.import_tf_tensor(mesh, self.x, [replica, example, pixel])
        labels = mtf.import_tf_tensor(mesh, self.y, [replica, example])
        init = [tf.random_normal_initializer(stddev=0.1, seed=seed) for seed in (1, 2)]
        w1 = mtf.get_variable(mesh, "w1", [pixel, hidden], initializer=init[0])
        w2 = mtf.get_variable(mesh, "w2", [hidden, digit], initializer=init[1])
        h = mtf.relu(mtf.einsum([images, w1], [replica, example, hidden]))
        logits = mtf.einsum([h, w2], [replica, example, digit])
        loss = mtf.reduce_mean(
            mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
        )

        opt = wrap(mtf.optimize.AdamWeightDecayOptimizer(0.003))
        grads = mtf.gradients([loss], [w1, w2])
        update_ops = opt.apply_grads(grads, graph.trainable_variables)

        devices = [f"/device:CPU:{i}" for i in range(8)]
        mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(MESH_SHAPE), mtf.convert_to_layout_rules(LAYOUT), devices
        )
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        self.update = [lowering.lowered_operation(op) for op in update_ops]
        # A separate session.run reads the values of variables after the step.
        state = getattr(opt, "state", None)  # CrossShardOptimizer has none
        self.shown = {
            "weights": [lowering.export_to_tf_tensor(w) for w in (w1, w2)],
            "state": {
                name: lowering.export_to_tf_tensor(getattr(state, name).value)
                for name in (("made", "dropped", "update_step") if state else ())
            },
        }
        start = [tf.global_variables_initializer(), lowering.copy_masters_to_slices()]
        self.session = tf.Session(config=gs.session_config(num_cpu_devices=8))
        for op in start:
            self.session.run(op)

    def step(self, x, y):
        """Trains on a batch; returns the weights and the counts of each replica after the step."""
        self.session.run(self.update, {self.x: x, self.y: y})
        return self.session.run(self.shown)


def evaluate(weights, images, digits):
    """Loss and accuracy on held-out images."""
    logits = np.maximum(images @ weights[0], 0) @ weights[1]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    accuracy = np.mean(logits.argmax(axis=1) == digits)
    return -log_p[np.arange(len(digits)), digits].mean(), accuracy


def draw(path, losses, contributed, dead):
    """Draws the losses, and below them which replicas contributed in each step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = np.arange(1, len(contributed) + 1)
    for (name, values), style in zip(losses.items(), ("-", "--", ":")):
        (line,) = top.plot(steps, values, style, label=name, linewidth=2)
        finite = np.isfinite(values)
        if not finite.all():
            last = steps[finite][-1]
            top.plot(last, values[last - 1], "X", color=line.get_color(), markersize=9)
            text = {"xytext": (8, 28), "textcoords": "offset points", "color": line.get_color()}
            top.annotate("NaN from here on", (last, values[last - 1]), **text)
    top.axvspan(dead.start + 0.5, dead.stop + 0.5, color="gray", alpha=0.2)
    top.text(dead.start + 2, 0.03, "no data", transform=top.get_xaxis_transform())
    top.set(ylabel="held-out loss", yscale="log", title=f"Replica {DEAD} dies and comes back")
    top.legend()
    for kind, color, label in (
        (contributed, "tab:blue", "contributed"),
        (~contributed, "tab:red", "dropped"),
    ):
        at, replica = np.nonzero(kind)
        bottom.bar(steps[at], 0.8, 1, replica - 0.4, color=color, label=label)
    for replica, made in enumerate(contributed.T):
        text = f"{made.sum()} contributed\n{(~made).sum()} dropped"
        bottom.annotate(
            text, (1.01, replica), xycoords=bottom.get_yaxis_transform(), va="center", fontsize=8
        )
    bottom.set(xlabel="step", ylabel="replica", yticks=range(contributed.shape[1]))
    bottom.set_xlim(0.5, len(steps) + 0.5)
    bottom.invert_yaxis()
    figure.legend(*bottom.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main(steps, png):
    """Trains all three.

    Returns:
      By name the held-out loss after the first step and after the last, and the accuracy; what
      SyncReplicasOptimizer has counted; the steps without data.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    (images, digits), held_out = handwriting.load(HELD_OUT)
    dead = range(steps * 2 // 5, steps * 3 // 5)  # counted from 0
    trainers = dict(zip(NAMES, map(Trainer, (sync_replicas, sync_replicas, cross_shard))))
    results = {name: [] for name in NAMES}
    counts = []
    progress = trange(steps)
    for step in progress:
        shape = [AXES.num_shards, REPLICA_BATCH]
        rows = np.random.RandomState(step).randint(0, len(images), shape)
        healthy, broken = images[rows], images[rows]
        if step in dead:
            broken[DEAD] = np.nan
        for name, x in zip(NAMES, (healthy, broken, broken)):
            shown = trainers[name].step(x, digits[rows])
            results[name].append(evaluate(shown["weights"], *held_out))
            if name == NAMES[1]:
                counts.append(shown["state"])
        losses = {name: f"{values[-1][0]:.3f}" for name, values in results.items()}
        progress.set_postfix(losses, refresh=False)
    losses = {name: [loss for loss, _ in values] for name, values in results.items()}
    made = np.array([state["made"] for state in counts])
    draw(png, losses, np.diff(made, axis=0, prepend=0) > 0, dead)
    rows = {name: (values[0][0], *values[-1]) for name, values in results.items()}
    return rows, counts[-1], dead


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--png", type=pathlib.Path, default=pathlib.Path("runs/sync_replicas.png"))
    results, counts, dead = main(**vars(parser.parse_args()))
    print(f"{'held-out:':24}  loss after step 1  at the end  accuracy")
    for name, (first, last, accuracy) in results.items():
        print(f"{name:24}  {first:17.3f}  {last:10.3f}  {accuracy:8.1%}")
    print(
        f"\nreplica {DEAD} had no data in {len(dead)} steps, {counts['update_step']} updates made"
    )
    print("replica  contributed  dropped")
    for replica, (made, dropped) in enumerate(zip(counts["made"], counts["dropped"])):
        print(f"{replica:7}  {made:11}  {dropped:7}")
