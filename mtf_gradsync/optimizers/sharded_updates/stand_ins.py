"""What an inner optimizer sees in place of a variable of which each replica updates a part."""

from __future__ import annotations

from typing import Mapping, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import init_stand_in, reassign
from mtf_gradsync.gradients.parts import GatherParts, TakePart
from mtf_gradsync.step import Plan


class PartOfVariable(mtf.Variable):
    """A variable's part, as a variable of the same name and dtypes.

    Its dimensions are laid out over the replica axes, and so are slots of its shape. It is in none
    of the graph's lists; what is assigned to it is put together by `assign_whole`.

    Attributes:
      whole: the variable.
    """

    def __init__(self, whole: mtf.Variable, shape: mtf.Shape):
        """Takes each processor's part.

        Args:
          whole: the variable.
          shape: `whole.shape` with other names of dimensions.
        """
        init_stand_in(self, whole, TakePart(whole.value, shape).outputs[0])
        self.whole = whole


# They change element by element what they are given cast to: sent in that dtype, bits stay.
_CASTING = (mtf.assign_slice, mtf.assign_add_slice, mtf.assign_sub_slice)


def assign_whole(
    updates: Sequence[mtf.Operation], parts: Mapping[mtf.Variable, PartOfVariable]
) -> None:
    """Makes assignments to parts ones to the whole variables, of what is gathered.

    Args:
      updates: what an inner optimizer returned. Its assignments are changed in place.
      parts: variable -> its part.

    Raises:
      ValueError: what is assigned does not have the shape of the part.
    """
    found = [u for u in updates if isinstance(u, mtf.Assign)]
    # By the assignment and the place in it: what is sent, and the shape of the whole.
    sent: dict[tuple[mtf.Assign, int], tuple[mtf.Tensor, mtf.Shape]] = {}
    for update in found:
        for place, (variable, value) in enumerate(zip(update.variables, update.inputs)):
            whole = _whole(variable)
            if whole not in parts:
                continue
            shape = parts[whole].shape
            if value.shape != shape:
                raise ValueError(
                    f"The inner optimizer assigns a value of shape {value.shape.to_string} to "
                    f"{whole.name!r}, whose part has the shape {shape.to_string}. "
                    "ShardedUpdateOptimizer works around optimizers that keep the shape of the "
                    "variable that they are given."
                )
            if update.assign_fn in _CASTING and value.dtype != whole.slice_dtype:
                value = mtf.cast(value, whole.slice_dtype)
            sent[update, place] = value, whole.shape
    if not sent:
        return
    values, shapes = zip(*sent.values())
    gathered = dict(zip(sent, GatherParts(values, shapes).outputs))
    for update in found:
        new = [gathered.get((update, i), value) for i, value in enumerate(update.inputs)]
        reassign(update, list(map(_whole, update.variables)), new)
    # Behind what they assign.
    Plan.of(found[0].graph).arrange(found)


def _whole(variable: mtf.Variable) -> mtf.Variable:
    return variable.whole if isinstance(variable, PartOfVariable) else variable
