"""The first values of wrappers' state in a new run, even if variables come from another run.

Counters and sums begin at zero. A derived variable, such as a moving average, begins with the value
that its source variable has when training begins. Its initial value is a mark: NaNs of a certain
bit pattern, which no arithmetic makes. Before every training, Mesh-TF copies masters (values as in
checkpoints) to slices. If a derived variable's master has the mark, its slices are copied from the
master of the source variable, so that training steps need not care. When slices are copied back to
masters, they replace the mark.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, NamedTuple

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_copy_to_slices, master_of
from mtf_gradsync.optimizers.state.variables import STATE_COLLECTION, StateNote

# The collection of a tf graph's `Beginning`s. It is not exported, as its key is not a string.
_BEGINNINGS = ("mtf_gradsync beginnings",)
# The collection of names of derived variables, lowered or not.
_DERIVED = ("mtf_gradsync derived variables",)
# The bits of the mark as a signed integer, by dtype. NaNs of arithmetic have other last bits.
_MARKS = {
    tf.bfloat16: (tf.int16, 0x7FE5),
    tf.float16: (tf.int16, 0x7F35),
    tf.float32: (tf.int32, 0x7FE5B3A1),
    tf.float64: (tf.int64, 0x7FFCB3A1B3A1B3A1),
}


class Beginning(NamedTuple):
    """The record of a derived variable in a tf graph.

    Attributes:
      name: the name of the derived variable.
      source_name: the name of the source variable.
      value: the value that the derived variable's slices get: that of its own master, or of the
        source variable.
      source: the value of the source variable's master, in the shape and dtype of `value`.
      dtype: the dtype of the source variable's slices.
    """

    name: str
    source_name: str
    value: tf.Tensor
    source: tf.Tensor
    dtype: tf.DType


class DerivedVariable(mtf.Variable):
    """A variable that begins with another variable's value; made by `derived_variable`."""

    _source: mtf.Variable
    _own_master: Callable[[], Any]
    _is_alone = False

    def get_master(self) -> Any:
        """Returns the tensor from which slices are copied; on one processor the master itself.

        It has the master's value or, if the master has the mark, the source variable's value.
        """
        return self._own_master() if self._is_alone else self._beginning().value

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        self._is_alone = mesh_impl.size == 1
        super().lower(lowering)
        if not self._is_alone:
            return
        laid_out = lowering.variables[self]
        with mtf.utils.outside_all_rewrites():
            value = self._beginning().value
            whole = mesh_impl.LaidOutTensor([value]).all_slices
            give_copy_to_slices(laid_out, laid_out.assign_to_slices(mtf.assign_slice, whole))

    def _beginning(self) -> Beginning:
        with tf.device(self.master_device), tf.name_scope("begins"):
            master = tf.convert_to_tensor(self._own_master())
            as_integer, mark = _MARKS[master.dtype]
            first = tf.bitcast(tf.reshape(master, [-1])[:1], as_integer)
            is_new = tf.reduce_all(tf.equal(first, tf.constant(mark, as_integer)))
            source = tf.cast(tf.convert_to_tensor(self._source.get_master()), master.dtype)
            source = tf.broadcast_to(source, master.shape)
            value = tf.where_v2(is_new, source, master)
        found = Beginning(self.name, self._source.name, value, source, self._source.slice_dtype)
        tf.add_to_collection(_BEGINNINGS, found)
        return found


def derived_variable(
    source: mtf.Variable, make: Callable[[Callable[..., Any]], mtf.Variable]
) -> mtf.Variable:
    """Makes a variable that begins with the value that `source` has when training begins.

    Args:
      source: the source variable, whose dimensions are the last dimensions of the new variable.
      make: a function of an initializer that finds or makes the new variable with it.

    Returns:
      The new variable. If it is not of floating point, it begins with the initial value of `source`
      instead.
    """

    def initial(shape: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
        if dtype in _MARKS:
            as_integer, mark = _MARKS[dtype]
            return tf.bitcast(tf.fill(shape, tf.constant(mark, as_integer)), dtype)
        return tf.broadcast_to(tf.cast(master_of(source).initial_value, dtype), shape)

    variable = make(initial)
    if isinstance(variable, DerivedVariable) or variable.master_dtype not in _MARKS:
        return variable
    variable._own_master, variable._source = variable.get_master, source
    vars(variable).pop("get_master", None)
    variable.__class__ = DerivedVariable
    tf.add_to_collection(_DERIVED, variable.name)
    return variable


class Beginnings:
    """A graph's derived variables, for sessions that set source variables before the first step.

    Attributes:
      are_equal: for each derived variable, by name, a boolean scalar: whether its master has the
        value of the source variable's master. If so, and if no step was made, the derived variable
        can begin anew with another value.
    """

    def __init__(self, graph: tf.Graph):
        """Adds the operations of `are_equal` to the default graph, whose mtf graph is lowered."""
        self._found: dict[str, Beginning] = {x.name: x for x in graph.get_collection(_BEGINNINGS)}
        self.are_equal: dict[str, tf.Tensor] = {}
        for one in self._found.values():
            # Masters may be wider than slices, and lose bits when these are copied back.
            pair = (tf.cast(x, one.dtype) for x in (one.value, one.source))
            self.are_equal[one.name] = tf.reduce_all(tf.equal(*pair))

    def marks(self, are_equal: Mapping[str, Any], written: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the marks to write into masters of derived variables, by name.

        With them the variables begin with their sources' new values when slices are copied.
        `are_equal` are the values of the tensors in the attribute `are_equal`, and `written` are
        the names of the variables that the session sets.
        """
        written = set(written)
        return {
            name: self._mark(self._found[name].value)
            for name, is_equal in are_equal.items()
            if is_equal and self._found[name].source_name in written
        }

    def _mark(self, value: tf.Tensor) -> np.ndarray:
        as_integer, mark = _MARKS[value.dtype]
        bits = np.full(value.shape.as_list(), mark, as_integer.as_numpy_dtype)
        return bits.view(value.dtype.as_numpy_dtype).reshape(value.shape.as_list())


def is_marked(value: np.ndarray) -> bool:
    """Returns whether a derived variable's value in a checkpoint is the mark, not yet replaced."""
    dtype = tf.as_dtype(value.dtype)
    if dtype not in _MARKS or not value.size:
        return False
    as_integer, mark = _MARKS[dtype]
    return value.reshape(-1)[:1].view(as_integer.as_numpy_dtype)[0] == mark


def begin_anew(graph: tf.Graph) -> set[str]:
    """Returns the names of wrappers' variables that a new run never takes from another run.

    Slots of the inner optimizer, and counters that belong to them, are not among these.
    """
    notes: Iterable[StateNote] = graph.get_collection(STATE_COLLECTION)
    derived = graph.get_collection(_DERIVED)
    own = (note.name for note in notes if note.start is not None and note.follows is None)
    return {*derived, *own}
