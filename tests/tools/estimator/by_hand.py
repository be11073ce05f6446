"""The same model_fn as of `digits`, all by hand: as GPT-Neo and Mesh-TF's own programs have it."""

from __future__ import annotations

from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.estimator import digits

# isort: split
from tensorflow.python.tpu import tpu_estimator


def model_fn(features, labels, mode, params, config):
    del config
    step = tf.train.get_global_step()
    shape, layout = map(
        lambda convert, text: convert(text),
        (mtf.convert_to_shape, mtf.convert_to_layout_rules),
        (params.get("mesh_shape", digits.MESH), digits.LAYOUT),
    )
    placer = None
    if params["use_tpu"]:
        context = params["context"]
        hosts = [context.tpu_host_placement_function(host_id=i) for i in range(context.num_hosts)]
        placer = mtf.utils.BalancedVariablePlacer(hosts, [0] * len(hosts))
        mesh_impl = mtf.simd_mesh_impl.SimdMeshImpl(
            shape, layout, [""] * shape.size, context.device_assignment
        )
    else:
        devices = [f"/device:CPU:{i}" for i in range(shape.size)]
        mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, devices)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", placer)
    batch = mtf.Dimension("batch", params["batch_size"])
    images = mtf.import_tf_tensor(
        mesh,
        tf.reshape(features["image"], [batch.size, 64]),
        mtf.Shape([batch, mtf.Dimension("pixel", 64)]),
    )
    logits = digits.network(images)
    digit = logits.shape[-1]
    if mode == tf.estimator.ModeKeys.PREDICT:
        found = mtf.anonymize(mtf.argmax(logits, digit))
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        predictions = {"digit": lowering.export_to_tf_tensor(found)}

        def scaffold_fn():
            return tf.train.Scaffold(
                local_init_op=tf.group(
                    tf.train.Scaffold.default_local_init_op(), lowering.copy_masters_to_slices()
                )
            )

        return tpu_estimator.TPUEstimatorSpec(
            mode=mode,
            predictions=predictions,
            scaffold_fn=scaffold_fn,
            prediction_hooks=[mtf.MtfRestoreHook(lowering)],
        )
    labels = mtf.import_tf_tensor(mesh, tf.reshape(labels, [batch.size]), mtf.Shape([batch]))
    loss = mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
    )
    if mode == tf.estimator.ModeKeys.EVAL:
        whole = mtf.anonymize(logits), mtf.anonymize(labels)
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        tf_logits, tf_labels = (lowering.export_to_tf_tensor(x) for x in whole)
        return tpu_estimator.TPUEstimatorSpec(
            mode=mode,
            loss=lowering.export_to_tf_tensor(loss),
            eval_metrics=(lambda labels, logits: digits.metrics(labels, logits),
                          [tf_labels, tf_logits]),
            evaluation_hooks=[mtf.MtfRestoreHook(lowering)],
        )  # fmt: skip
    mtf.scalar_summary("loss", loss)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = digits.OPTIMIZERS[params["optimizer"]](variables).apply_grads(grads, variables)
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    tf_loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
    tf.add_to_collection("loss to see", tf_loss)
    done = [lowering.lowered_operation(op) for op in updates]
    with tf.control_dependencies(done):
        done.append(tf.assign_add(step, 1))
    train_op = tf.group(done)
    host_call = mtf.utils.create_host_call(params["model_path"])
    mtf.utils.remove_summaries()
    with mtf.utils.outside_all_rewrites():
        restore_hook = mtf.MtfRestoreHook(lowering)
        saver = tf.train.Saver(tf.global_variables(), sharded=True, save_relative_paths=True)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        saver_hook = tf.train.CheckpointSaverHook(
            params["model_path"],
            save_steps=params["steps_per_checkpoint"],
            saver=saver,
            listeners=[mtf.MtfCheckpointSaverListener(lowering)],
        )
    return tpu_estimator.TPUEstimatorSpec(
        mode=mode,
        loss=tf_loss,
        host_call=host_call,
        train_op=train_op,
        training_hooks=[restore_hook, saver_hook],
    )
