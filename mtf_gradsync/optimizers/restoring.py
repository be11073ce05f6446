"""Restores checkpoints, and says what does not fit before anything is changed."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from typing import Any, Iterable, Mapping

import numpy as np

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import patch
from mtf_gradsync._private.tensorflow import advance_step_after_reads, variables_of_saver
from mtf_gradsync.optimizers.resharding import (
    ACCUMULATOR,
    ISLAND,
    STATE_COLLECTION,
    Change,
    Saved,
    StateNote,
    changes,
    is_derived,
    value_for,
    weights_taken_out,
)

_logger = logging.getLogger(__name__)
# The collection of counters of sums that a tf graph does not keep, though one with other arguments
# would. It is not exported, as its key is not a string.
_NOT_KEPT = ("mtf_gradsync sums not kept",)
_RESTORE_ADAPTED = (
    "Restore it by gs.ReshardingSaver(...), or restore what gs.adapt_checkpoint(path, directory) "
    "returns."
)


def note_sums_not_kept(counter: str, remedy: str) -> None:
    """Records that the default graph does not keep the sums that a counter in checkpoints counts.

    `remedy` tells what to do about a checkpoint that has some.
    """
    tf.add_to_collection(_NOT_KEPT, (counter, remedy))


def check_sums_kept(path: str, graph: tf.Graph | None = None) -> None:
    """Raises ValueError if restoring a checkpoint into a graph would lose sums of gradients."""
    found = _sums_lost(path, graph)
    for counter, (count, remedy) in found.items():
        raise ValueError(
            f"The checkpoint {path} has the sums of {count} microbatch steps without an update "
            f"({counter}), which this graph would lose. {remedy} To lose them, restore "
            "gs.adapt_checkpoint(path, directory, drop_sums=True)."
        )


def _sums_lost(path: str, graph: tf.Graph | None) -> dict[str, tuple[int, str]]:
    notes = (graph or tf.get_default_graph()).get_collection(_NOT_KEPT)
    if not notes:
        return {}
    reader = tf.train.load_checkpoint(path)
    counts = {c: (int(reader.get_tensor(c)), r) for c, r in notes if reader.has_tensor(c)}
    return {counter: found for counter, found in counts.items() if found[0]}


def adapt_checkpoint(path: str, directory: str, drop_sums: bool = False) -> str:
    """Makes a checkpoint of another run restorable into the default graph.

    If that run had another mesh, sums of the shards are distributed anew by `reshard`, and every
    replica of a SyncReplicasOptimizer begins with the step of the last update. If it had other
    islands (`OuterOptimizer`), or none, sums keep the mean over the batch, and slots begin with the
    mean over the islands. Sums of gradients times weights are divided by the weights where the
    graph has none. If that run had no wrapper, sums and counts begin at zero, moving averages at
    the variables, and counters of updates at the number of updates. All other values are copied.
    The checkpoint itself is only read. Call it when the graph has its optimizer's state (after
    `apply_grads`), in programs that make their own Saver; `ReshardingSaver` calls it itself.

    Args:
      path: a checkpoint.
      directory: a directory to write to, made if it is missing. The new checkpoint has the name of
        the old one; in the directory of path itself, "<name>-resharded".
      drop_sums: whether to make sums of gradients zero that the graph does not keep, in place of an
        error.

    Returns:
      The checkpoint to restore: path itself if everything fits, or the one that was written.

    Raises:
      ValueError: state of an optimizer differs in more than its shards and islands (TensorFlow's
        own Saver would restore a resource variable of another shape without an error); or the
        checkpoint has sums of microbatch steps, but the graph's accumulation has none, as its
        backward_passes_per_step is 1.
    """
    if not drop_sums:
        check_sums_kept(path)
    changed = changes(path)
    lost = _sums_lost(path, None)
    if not changed and not lost:
        return path
    for name, change in sorted(changed.items()):
        if not change.fits:
            raise ValueError(
                f"{name} has the shape {list(change.saved_shape)} in the checkpoint {path}, but "
                f"{list(change.shape)} here, which another number of shards or islands does not "
                "explain: the checkpoint is of another model. Restore one of this model."
            )
    saved = Saved(path)
    new = {name: c for name, c in sorted(changed.items()) if c.saved_name is None}
    derived = [name for name, c in new.items() if is_derived(c, saved)]
    for names, how in (
        ([name for name in new if name not in derived], "begin as in a new run"),
        (derived, "begin from the checkpoint's variables and its number of updates"),
    ):
        if names:
            _logger.warning(
                "The checkpoint %s has no %s of this wrapper, as that of a run without the wrapper "
                "or with other arguments: these variables %s.",
                path,
                some_of(names),
                how,
            )
    _warn_of_rounds(path, changed, saved)
    name = os.path.basename(path)
    if os.path.abspath(directory) == os.path.dirname(os.path.abspath(path)):
        name += "-resharded"
    tf.io.gfile.makedirs(directory)
    target = os.path.join(directory, name)
    temporary = os.path.join(directory, f".resharding-{uuid.uuid4().hex}")
    tf.io.gfile.makedirs(temporary)
    try:
        values = {state: value_for(state, changed, saved) for state in sorted(changed)}
        if lost:
            kept = {v.op.name for v in tf.global_variables()}
            ends = (f"/{ACCUMULATOR}", f"/{ACCUMULATOR}/{ISLAND}")
            gone = [*lost, *(x for x in saved.shapes if x.endswith(ends) and x not in kept)]
            values.update((x, np.zeros_like(saved.read(x))) for x in gone)
        without = weights_taken_out(changed, saved)
        write_changed(path, os.path.join(temporary, name), values, set(saved.shapes) - without)
        # A checkpoint exists if its index does, so that is deleted first and moved last.
        if tf.io.gfile.exists(target + ".index"):
            tf.io.gfile.remove(target + ".index")
        files = tf.io.gfile.listdir(temporary)
        for file in sorted(files, key=lambda file: file.endswith(".index")):
            tf.io.gfile.rename(
                os.path.join(temporary, file), os.path.join(directory, file), overwrite=True
            )
    finally:
        tf.io.gfile.rmtree(temporary)
    return target


def _warn_of_rounds(path: str, changed: Mapping[str, Change], saved: Saved) -> None:
    """Warns where a graph without islands begins in the middle of a round of islands."""
    if not saved.held or any(c.note.held for c in changed.values()):
        return
    graph_has = {v.op.name for v in tf.global_variables()}
    trained = [n for n in saved.held if n in graph_has and f"{n}/{ISLAND}" not in graph_has]
    if any((saved.read(f"{n}/{ISLAND}") != saved.read(n)).any() for n in trained):
        _logger.warning(
            "The checkpoint %s is of the middle of a round of OuterOptimizer, which this graph "
            "does not have: variables begin with the outer values, so that what islands have "
            "learned since the last outer step is lost. To keep it, go on with OuterOptimizer up "
            "to the end of the round.",
            path,
        )


def write_changed(
    path: str, target: str, new: Mapping[str, np.ndarray], only: Iterable[str] | None = None
) -> None:
    """Writes a copy of a checkpoint to `target`, with new values by name.

    It copies all other values, or those named in `only`.
    """
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    copied = sorted(set(dtypes if only is None else only) - set(new))
    with tf.Graph().as_default():
        values: Any = []
        if copied:
            values = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=copied,
                shape_and_slices=[""] * len(copied),
                dtypes=[dtypes[name] for name in copied],
            )
        inputs = {name: tf.placeholder(value.dtype, value.shape) for name, value in new.items()}
        save = tf.raw_ops.SaveV2(
            prefix=target,
            tensor_names=[*copied, *new],
            shape_and_slices=[""] * (len(copied) + len(new)),
            tensors=[*values, *inputs.values()],
        )
        with tf.Session() as session:
            session.run(save, {inputs[name]: value for name, value in new.items()})


class ReshardingSaver(tf.train.Saver):
    """A `tf.train.Saver` that also restores checkpoints of other runs.

    Those may be of another number of shards, or of a run without the wrapper; see
    `adapt_checkpoint`. To restore one it writes an adapted copy for a moment: to a directory for
    temporary files, or next to the checkpoint if another machine restores it. It raises ValueError
    where sums of gradients in a checkpoint would be lost; see there, too.
    """

    _checks_sums = True

    def restore(self, sess: Any, save_path: str) -> None:
        """See `tf.train.Saver.restore`."""
        # The parent raises the error for a path that is not a checkpoint.
        if not _is_checkpoint(save_path) or not changes(save_path, sess.graph):
            super().restore(sess, save_path)
            return
        is_elsewhere = "://" in str(save_path) or bool(getattr(sess, "sess_str", ""))
        directory = (
            os.path.join(os.path.dirname(save_path), f".adapted-{uuid.uuid4().hex}")
            if is_elsewhere
            else tempfile.mkdtemp()
        )
        try:
            with sess.graph.as_default():
                adapted = adapt_checkpoint(save_path, directory, not self._checks_sums)
            super().restore(sess, adapted)
        finally:
            if tf.io.gfile.exists(directory):
                tf.io.gfile.rmtree(directory)


def _is_checkpoint(path: str) -> bool:
    # As `tf.train.checkpoint_exists`, which warns that it is deprecated.
    return bool(path) and any(tf.io.gfile.exists(name) for name in (f"{path}.index", path))


def check_what_savers_restore() -> None:
    """Makes TensorFlow's own savers raise errors about wrappers' state that say what to do.

    A ValueError where sums of gradients in the checkpoint would be lost, and a NotFoundError, in
    place of TensorFlow's, where the checkpoint has no state of a wrapper.
    """

    def check_and_restore(restore: Any) -> Any:
        def restore_checked(self: tf.train.Saver, sess: Any, save_path: str) -> None:
            graph = getattr(sess, "graph", None)  # None where TensorFlow is eager
            if graph is None or not _is_checkpoint(save_path):
                restore(self, sess, save_path)
                return
            if getattr(self, "_checks_sums", True):
                check_sums_kept(save_path, graph)
            has_state = bool(graph.get_collection(STATE_COLLECTION))
            found = changes(save_path, graph) if has_state else {}
            own = variables_of_saver(self)
            alike = [n for n, c in found.items() if c.looks_alike and (own is None or n in own)]
            if alike:
                raise ValueError(
                    f"The checkpoint {save_path} has {some_of(alike)} of other islands or shards, "
                    "or with weights where this graph has none (or the other way round): taken as "
                    f"they are, they would be too large or too small. {_RESTORE_ADAPTED}"
                )
            try:
                restore(self, sess, save_path)
            except tf.errors.NotFoundError as error:
                missing = [name for name, c in found.items() if c.saved_name != name]
                if not missing:
                    raise
                text = (
                    f"The checkpoint {save_path} does not have {some_of(missing)}: it is of a run "
                    "without this wrapper, or whose wrapper had other arguments "
                    f"(backward_passes_per_step=1, say). {_RESTORE_ADAPTED}"
                )
                raise tf.errors.NotFoundError(None, None, text) from error

        return restore_checked

    patch(tf.train.Saver, "restore", check_and_restore)


class _Lowering(mtf.Lowering):
    """A lowering for pipelines of Mesh-TensorFlow, which have savers and a step of their own.

    Pipelines make a plain saver, add it to the collection of savers (or leave that to the session),
    and copy the masters after it restored them; `mtf.MtfRestoreHook` asks for that copy before a
    session begins.
    """

    def copy_masters_to_slices(self) -> tf.Operation:
        """See `mtf.Lowering.copy_masters_to_slices`."""
        savers = tf.get_collection(tf.GraphKeys.SAVERS)
        for saver in savers:
            # Not savers of other classes, which may restore in their own way.
            if type(saver) is tf.train.Saver:
                saver.__class__ = ReshardingSaver
        graph = tf.get_default_graph()
        if graph.get_name_scope().endswith("mtf_restore_hook"):
            # Pipelines of Mesh-TensorFlow advance the step beside whoever reads it.
            advance_step_after_reads(graph)
            if not savers:
                # A session would make this saver a moment later.
                saver = ReshardingSaver(sharded=True, allow_empty=True, defer_build=True)
                tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        with tf.control_dependencies(_checks_of_shapes()):
            return super().copy_masters_to_slices()


def _checks_of_shapes() -> list[tf.Operation]:
    """Makes operations that fail if a plain saver has restored the sums of another mesh.

    TensorFlow does not compare the shapes of resource variables.
    """
    graph = tf.get_default_graph()
    notes = graph.get_collection(STATE_COLLECTION)
    by_shard = {note.name for note in notes if note.num_shard_dims or note.held}
    checks = []
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        handle = getattr(variable, "handle", None)  # Ref variables have none.
        if variable.op.name in by_shard and handle is not None and handle.dtype == tf.resource:
            with tf.device(variable.device):
                shape = tf.raw_ops.VariableShape(input=handle)
                fits = tf.reduce_all(tf.equal(shape, variable.shape.as_list()))
                message = (
                    f"{variable.op.name} was restored from a checkpoint of another mesh by a plain "
                    "tf.train.Saver: use gs.ReshardingSaver(...), which reshards it. Shapes in the "
                    "checkpoint and here:"
                )
                checks.append(tf.Assert(fits, [message, shape, variable.shape.as_list()]))
    return checks


class _AdaptsLowering(mtf.Operation):
    """Makes a lowering a `_Lowering`; does nothing in a step."""

    def __init__(self, mesh: mtf.Mesh):
        super().__init__([], mesh=mesh, name="adapts_lowering")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        if type(lowering) is mtf.Lowering:
            lowering.__class__ = _Lowering


def note_state(variable: mtf.Variable, note: StateNote | None = None, **how: Any) -> None:
    """Records how a variable is read from checkpoints of other runs.

    Savers in the graph's collection of savers follow it, once an `mtf.MtfRestoreHook` begins.
    `how` are fields of `StateNote` other than the name, or a `note` has them.
    """
    note = note or StateNote(variable.name, **how)
    tf.add_to_collection(STATE_COLLECTION, note._replace(name=variable.name))
    adapt_lowering(variable)


def adapt_lowering(variable: mtf.Variable) -> None:
    """Makes the lowering of a variable's graph work in pipelines of Mesh-TensorFlow.

    Their savers read checkpoints of other runs, and their step is advanced after it was read.
    """
    operations = variable.graph.operations
    if not any(isinstance(op, _AdaptsLowering) for op in reversed(operations)):
        _AdaptsLowering(variable.mesh)
