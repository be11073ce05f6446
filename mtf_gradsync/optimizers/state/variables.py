"""Variables of wrappers' state. Their names are a checkpoint format."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.optimizers.state.restoring import note_state

ACCUMULATOR = "gradient_accumulator"


class UncheckpointedVariable(mtf.Variable):
    """A mesh variable without a master: zeros at the start of every session, in no checkpoint.

    Mesh-TF keeps a master copy of each variable on the host; a local accumulator's is as large as
    all shards' slices together. On a mesh of one processor the master is the only copy, and is
    kept as a local variable.
    """

    _master: Any

    def __init__(self, mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: tf.DType):
        # Mesh-TF 0.1.21 makes the master in its constructor; a scalar stands in for it.
        self._whole_shape = shape.to_integer_list
        self._alone = False
        super().__init__(
            mesh,
            name,
            mtf.Shape([]),
            unstacked(dtype),
            tf.zeros_initializer(),
            False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        self._outputs = [mtf.Tensor(self, shape, dtype)]
        self._stand_in = self._master

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self._alone = lowering.mesh_impl(self).size == 1
        if self._alone and self._whole_shape:
            with tf.device(self._stand_in.device), tf.control_dependencies(None):
                self._master = tf.get_variable(
                    self.name + "_whole",
                    self._whole_shape,
                    self.master_dtype,
                    tf.zeros_initializer(),
                    trainable=False,
                    collections=[tf.GraphKeys.LOCAL_VARIABLES],
                )
        super().lower(lowering)

    def get_master(self) -> Any:
        """Returns zeros to fill the slices with; on one processor the variable itself."""
        if self._alone:
            return self._master
        with tf.device(self._stand_in.device):
            return tf.zeros(self._whole_shape, self.master_dtype)

    def assign_to_master(self, val: tf.Tensor) -> tf.Operation:
        """Does nothing: the slices are the only copy."""
        del val
        return tf.no_op()


def unstacked(dtype: tf.DType, activation_dtype: tf.DType | None = None) -> mtf.VariableDType:
    """Makes a dtype with which Mesh-TF's autostack does not stack a variable.

    Stacked variables need masters; autostack (0.1.21) compares the attributes of dtypes.

    Args:
      dtype: the dtype of master and slices.
      activation_dtype: the dtype of the value; None takes dtype.
    """
    result = mtf.VariableDType(dtype, dtype, activation_dtype or dtype)
    result.unstacked = id(result)
    return result


def scalar_state(
    mesh: mtf.Mesh,
    name: str,
    dtype: tf.DType = tf.int32,
    checkpointed: bool = True,
    stacked: bool = True,
    start: float | str = 0,
) -> mtf.Variable:
    """Finds or makes a scalar of a wrapper's state, zero at the start of training.

    Args:
      mesh: the mesh.
      name: its full name, without the current variable scope, so that a schedule in another scope
        finds the same variable.
      dtype: its dtype.
      checkpointed: whether savers of global variables write it.
      stacked: as for `state_variable`.
      start: its value after a checkpoint that does not have it; see `StateNote`.

    Returns:
      An `mtf.Variable`.
    """
    return named_state(mesh, name, mtf.Shape([]), dtype, checkpointed, stacked, start=start)


def named_state(
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape,
    dtype: tf.DType = tf.int32,
    checkpointed: bool = True,
    stacked: bool = False,
    start: float | str = 0,
    **note: Any,
) -> mtf.Variable:
    """Finds or makes a variable of a wrapper's state, with the same name in any variable scope.

    Args:
      mesh: the mesh.
      name: its full name.
      shape: its shape.
      dtype: its dtype.
      checkpointed: as for `state_variable`.
      stacked: as for `state_variable`.
      start: its first value if that is a number, else zero; and its value after a checkpoint that
        does not have it, see `StateNote`.
      **note: other fields of `StateNote`.

    Returns:
      An `mtf.Variable`.
    """
    initial = 0 if isinstance(start, str) else start
    with root_scope():
        result = state_variable(mesh, name, shape, dtype, checkpointed, stacked, initial)
    if checkpointed:
        note_state(result, start=start, **note)
    return result


def state_variable(
    mesh: mtf.Mesh,
    name: str,
    shape: mtf.Shape,
    dtype: tf.DType,
    checkpointed: bool = True,
    stacked: bool = True,
    start: float = 0,
) -> mtf.Variable:
    """Finds or makes a variable that is not trained, zero or another number at the start.

    Args:
      mesh: the mesh.
      name: name in the current variable scope.
      shape: its shape.
      dtype: its dtype, of master, slices and activations.
      checkpointed: whether savers of global variables write it. If not, it is zero again in
        every new session and has no master copy on the host.
      stacked: whether Mesh-TF's autostack may put it into one variable with others.
      start: its first value, if it is checkpointed.

    Returns:
      An `mtf.Variable`.
    """
    if checkpointed:
        kind = dtype if stacked else unstacked(dtype)
        initializer = tf.constant_initializer(start) if start else tf.zeros_initializer()
        return mtf.get_variable(
            mesh, name, shape, kind, initializer=initializer, trainable=False
        ).operation
    return UncheckpointedVariable(mesh, name, shape, dtype)
