"""ByVariable: other settings, another optimizer, or none, for groups of variables."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, NamedTuple, Sequence, Union

from mtf_gradsync._common import check_number, did_you_mean, elements, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync.compat_v1 import NOT_GIVEN, given_optimizer, is_v1
from mtf_gradsync.gradients.arguments import check_grads_and_variables, check_rate
from mtf_gradsync.gradients.clipping import check_clip_norm, clip_together
from mtf_gradsync.optimizers.sharded_variables import PartOfVariable
from mtf_gradsync.optimizers.slots import optimizer_of, optimizers_of, record_bare_update
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import FusedAllReduce
from mtf_gradsync.step.writes import gated_update

Which = Union[str, Callable[[mtf.Variable], bool]]


class _Group(NamedTuple):
    """Variables that one optimizer updates.

    Attributes:
      which: a regular expression that matches the names of the variables, or a function that
        returns whether a variable belongs to the group; None for all variables without a group.
      opt: the optimizer; None for variables that are not updated.
      clip_norm: the norm to which the group's gradients together are clipped; None for no clip.
      changes: the settings that differ from those of other variables, as text for `describe`.
    """

    which: Which | None
    opt: Any
    clip_norm: Any = None
    changes: str = ""

    def has(self, variable: mtf.Variable) -> bool:
        if isinstance(variable, PartOfVariable):
            variable = variable.full
        if self.which is None:
            return True
        if isinstance(self.which, str):
            return re.search(self.which, variable.name) is not None
        return bool(self.which(variable))

    @property
    def name(self) -> str:
        if self.which is None:
            return "the others"
        return self.which if isinstance(self.which, str) else _name_of(self.which)


@late_configurable(module="mtf_gradsync")
class ByVariable(mtf.optimize.Optimizer):
    """An optimizer that gives groups of variables their own settings or optimizers, or no updates.

    A variable belongs to the first group that matches it. `opt` updates variables that no group
    matches. `ByVariable` works inside every wrapper, and without a wrapper. Put wrappers around
    `ByVariable`, not into groups. Slots have the names that each optimizer gives them, so that
    checkpoints can be restored with other groups. Variables that no optimizer updates have no
    slots, and their gradients are neither accumulated nor reduced.

    References:
      `optax.multi_transform`; the parameter groups of `torch.optim`

    Examples:
      >>> adamw = functools.partial(gs.AdamWOptimizer, learning_rate=0.001)
      >>> opt = gs.ByVariable(adamw, [("bias|layer_norm", {"weight_decay_rate": 0.0})])
      >>> print(gs.describe(gs.CrossShardOptimizer(opt)))
      every step  reduce over the replica axes: fused              (CrossShardOptimizer)
                  update by AdamW, weight_decay_rate 0.0: bias|layer_norm
                  update by AdamW: the others
    """

    def __init__(
        self,
        opt: Any,
        groups: Sequence[tuple[Which, Any]],
        learning_rate: Any = NOT_GIVEN,
        name: str = "ByVariable",
    ):
        """Sets the groups.

        Args:
          opt: the optimizer of all variables without a group: a Mesh-TF optimizer, or a class or
            factory of one. A class or factory can be called again for groups with other arguments.
          groups: pairs (which, what): which variables, and how to update them. `which` is a regular
            expression that matches the names of the variables (`re.search`), or a function that
            returns whether a variable belongs to the group. `what` is a dictionary of arguments
            that differ from those of `opt` ("learning_rate", "weight_decay_rate", ...), another
            optimizer, or None for no update. A dictionary can also have "learning_rate_factor": the
            group's learning rate is this number times that of `opt`, also if that is a schedule;
            "clip_norm": the norm to which the group's gradients together are clipped; and
            "optimizer": another optimizer, or a class or factory that the other arguments are for.
          learning_rate: the learning rate for opt and the groups' classes or factories: a number, a
            scalar tensor or a variable; only if opt is a class or factory.
          name: name in errors and warnings.

        Raises:
          TypeError: an argument has the wrong type, or a wrapper or a v1 optimizer is in a group.
          ValueError: a pattern is no valid regular expression, or an argument is out of range.
        """
        self.name = name
        self._learning_rate = learning_rate
        self._others = _Group(None, self._make_optimizer(opt))
        pairs = elements(groups)
        if pairs is None:
            raise TypeError(
                f"{name}: groups must be a list of pairs (which variables, what updates them), got "
                f"{groups!r}."
            )
        self._groups = tuple(self._group(pair, opt) for pair in pairs)

    @property
    def _all(self) -> tuple[_Group, ...]:
        return (*self._groups, self._others)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers of all groups, and `opt`, each of them once.

        In place of a `ByVariable`, its own optimizers are in the result.
        """
        inside = (optimizers_of(group.opt) for group in self._all if group.opt is not None)
        return tuple({id(opt): opt for some in inside for opt in some}.values())

    def optimizer_of(self, variable: mtf.Variable) -> Any:
        """Returns the optimizer that updates a variable; None if nothing updates it."""
        return optimizer_of(self._group_of(variable).opt, variable)

    def _group_of(self, variable: mtf.Variable) -> _Group:
        return next(group for group in self._all if group.has(variable))

    def apply_grads(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Makes the updates of all groups.

        Args:
          grads: gradients of the variables, None for no update.
          variables: the mesh variables.

        Returns:
          A list of mtf operations.

        Raises:
          TypeError: a gradient or variable has the wrong type.
          ValueError: lengths differ, or a gradient has another shape or mesh than its variable.
        """
        grads, variables = check_grads_and_variables(grads, variables, same_shapes=True)
        if variables:
            self._warn_of_empty_groups(variables)
        # Gradients of one group may still have to read variables of another group.
        updates = gated_update(functools.partial(self._update, grads, variables), grads)
        record_bare_update(self, updates, variables)
        return updates

    def _update(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        updates: list[mtf.Operation] = []
        grads, of = self._clip_groups(grads, variables), [self.optimizer_of(v) for v in variables]
        # Once for all groups of an optimizer, also inside groups, as it may count its updates.
        for opt in self.optimizers:
            pairs = [(g, v) for g, v, its in zip(grads, variables, of) if its is opt]
            if pairs:
                updates += opt.apply_grads(*map(list, zip(*pairs)))
        return updates

    def _clip_groups(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Returns gradients, those of each group with "clip_norm" clipped, then groups inside."""
        grads, of = list(grads), [self._group_of(v) for v in variables]
        for group in self._all:
            places = [i for i, its in enumerate(of) if its is group]
            some = [grads[i] for i in places]
            if group.clip_norm is not None:
                owner = f"{self.name} ({group.name})"
                some, _ = clip_together(some, group.clip_norm, None, FusedAllReduce(), owner)
            if isinstance(group.opt, ByVariable):
                some = group.opt._clip_groups(some, [variables[i] for i in places])
            for i, grad in zip(places, some):
                grads[i] = grad
        return grads

    def apply_grad(self, grad: mtf.Tensor | None, var: mtf.Variable) -> list[mtf.Operation]:
        """Makes the update of the variable `var` by its gradient `grad`; returns mtf operations.

        The list of operations is empty if `grad` is None. Raises ValueError for a variable of a
        group with "clip_norm", because the norm is over all gradients of the group together.
        """
        opt: Any = self
        while isinstance(opt, ByVariable):
            group = opt._group_of(var)
            if group.clip_norm is not None:
                raise ValueError(
                    f"{opt.name}: the gradients of the group {group.name!r} are clipped by the "
                    f"norm of all of them, and apply_grad gets the gradient of {var.name!r} alone: "
                    "call apply_grads."
                )
            opt = group.opt
        return self.apply_grads([grad], [var])

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        """Returns the slot `name` of a variable if the optimizer of its group has `get_slot`.

        The result is None if that optimizer has no such method or no such slot, as for
        `MeshOptimizer.get_slot`. `get_slot` of a wrapper answers for all optimizers.
        """
        get_slot = getattr(self.optimizer_of(var), "get_slot", None)
        return get_slot(var, name) if get_slot else None

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots of optimizers that have `get_slot`, sorted."""
        names: set[str] = set()
        for opt in self.optimizers:
            names.update(getattr(opt, "get_slot_names", list)())
        return sorted(names)

    def variables(self) -> list[mtf.Variable]:
        """Returns the variables of the optimizers that can tell them, such as `MeshOptimizer`."""
        return [v for opt in self.optimizers for v in getattr(opt, "variables", list)()]

    def described(self, variables: Sequence[mtf.Variable]) -> list[tuple[Any, str, int]]:
        """Returns what `describe` prints: a triple (optimizer, text, count) for each group.

        The optimizer is None if the group is not updated. The text has the group's own settings and
        then the group's name. The count says how many of `variables` are in the group. Groups in
        which none of `variables` is are left out, unless `variables` is empty.
        """
        lines: list[tuple[Any, str, int]] = []
        for group in self._all:
            members = [v for v in variables if self._group_of(v) is group]
            if isinstance(group.opt, ByVariable) and (members or not variables):
                of = group.opt.described(members)
                lines += [(opt, f"{text} of {group.name}{group.changes}", n) for opt, text, n in of]
            elif members or not variables:
                lines.append((group.opt, f"{group.changes}: {group.name}", len(members)))
        return lines

    def _group(self, pair: Any, opt: Any) -> _Group:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"{self.name}: a group is a pair (which variables, what updates them), such as "
                f'("bias", {{"weight_decay_rate": 0.0}}), got {pair!r}.'
            )
        which, what = pair
        _check_which(self.name, which)
        if what is None:
            return _Group(which, None)
        if not isinstance(what, dict):
            return _Group(which, self._make_optimizer(what))
        changes = dict(what)
        clip_norm, make = changes.pop("clip_norm", None), changes.pop("optimizer", opt)
        if clip_norm is not None:
            check_clip_norm(clip_norm)
        text = "".join(f", {key} {value}" for key, value in what.items() if key != "optimizer")
        if changes:
            made = self._make_group_optimizer(changes, make, opt, which)
        else:
            made = self._others.opt if make is opt else self._make_optimizer(make)
        return _Group(which, made, clip_norm, text)

    def _make_group_optimizer(
        self, changes: dict[str, Any], make: Any, opt: Any, which: Which
    ) -> Any:
        """Makes the optimizer of a group from the arguments in the group's dictionary.

        Args:
          changes: the group's arguments, without "clip_norm" and "optimizer".
          make: the class or factory that is called with these arguments: the group's "optimizer" if
            it has one, and otherwise `opt`.
          opt: the argument `opt` of `ByVariable`. If `changes` has "learning_rate_factor", the
            group's learning rate is this factor times the learning rate of `opt`.
          which: what tells the group's variables (a regular expression or a function), for errors.
        """
        if not isinstance(make, type) and hasattr(make, "apply_grads"):
            raise TypeError(
                f"{self.name} cannot give the arguments {changes!r} of the group {which!r} "
                f"to the optimizer {make!r}, whose arguments are set. Give a class or factory as "
                "opt, such as functools.partial(gs.AdamWOptimizer, learning_rate=0.001) (in gin: "
                f"`{self.name}.opt = @AdamWOptimizer`, without parentheses)."
            )
        rate = {} if self._learning_rate is NOT_GIVEN else {"learning_rate": self._learning_rate}
        arguments = {**rate, **changes}
        factor = arguments.pop("learning_rate_factor", None)
        if factor is not None:
            of_opt = rate or getattr(opt, "keywords", {})
            if "learning_rate" in changes or of_opt.get("learning_rate") is None:
                raise TypeError(
                    f'{self.name}: "learning_rate_factor" for {which!r} multiplies the learning '
                    f"rate of {opt!r}. This works if the group has no learning_rate of its own, "
                    f"and that of opt is given: {self.name}(opt, groups, learning_rate=0.001)."
                )
            arguments["learning_rate"] = _scaled_rate(of_opt["learning_rate"], factor)
        try:
            made = make(**arguments)
        except TypeError as error:
            raise TypeError(
                f"{self.name}: {make!r} does not take {arguments!r} for {which!r}: {error} Give a "
                "factory its own arguments by name, such as functools.partial(gs.AdamWOptimizer, "
                "learning_rate=0.001)."
            ) from error
        return self._checked(made)

    def _make_optimizer(self, opt: Any) -> Any:
        """Returns `opt` if it is an optimizer; makes one if it is a class or factory.

        Raises TypeError if `opt`, or what it makes, is a wrapper or an optimizer of TensorFlow.
        """
        if not isinstance(opt, type) and hasattr(opt, "apply_grads"):
            return self._checked(opt)
        if self._learning_rate is NOT_GIVEN and callable(opt) and not isinstance(opt, type):
            return self._checked(opt())
        return self._checked(given_optimizer(opt, self._learning_rate, self.name))

    def _checked(self, opt: Any) -> Any:
        if isinstance(opt, Wrapper):
            raise TypeError(
                f"{self.name} updates by Mesh-TensorFlow optimizers, got the wrapper {opt.name}: "
                f"put the wrapper around {self.name}."
            )
        if is_v1(opt):
            raise TypeError(
                f"{self.name} updates by Mesh-TensorFlow optimizers, got the TensorFlow optimizer "
                f"{opt!r}: use gs.MeshOptimizer(optimizer)."
            )
        return given_optimizer(opt, NOT_GIVEN, self.name)

    def _warn_of_empty_groups(self, variables: Sequence[mtf.Variable]) -> None:
        """Warns once of each group to which no variable belongs.

        A group is looked for among all trainable variables of the graph, and among `variables`, the
        variables that are updated now.
        """
        known = {v.name: v for v in (*variables[0].graph.trainable_variables, *variables)}
        used = [self._group_of(v) for v in known.values()]
        for group in self._all:
            members = [v for v in variables if self._group_of(v) is group]
            if members and isinstance(group.opt, ByVariable):
                group.opt._warn_of_empty_groups(members)
            if group is self._others or any(group is one for one in used):
                continue
            is_late = any(group.has(v) for v in known.values())
            warn_once(
                f"empty group {self.name} {group.name}",
                "%s: no variable is in the group %r%s",
                self.name,
                group.name,
                ", because groups before it have all variables that it matches."
                if is_late
                else did_you_mean(group.name, known),
            )


def _scaled_rate(rate: Any, factor: Any) -> Any:
    """Returns a learning rate times a number.

    `rate` is a number, a scalar tensor or variable, or a function without arguments that returns
    such a rate. If `rate` is a function, the result is a function, too. `factor` is a number of 0
    or more.
    """
    factor = check_number("learning_rate_factor", factor, "a number of 0 or more")
    if callable(rate):
        return lambda: _scaled_rate(rate(), factor)
    rate = check_rate(rate)
    return (rate.value if isinstance(rate, mtf.Variable) else rate) * factor


def _name_of(which: Callable[..., Any]) -> str:
    return getattr(which, "__name__", None) or repr(which)


def _check_which(name: str, which: Any) -> None:
    if isinstance(which, str):
        try:
            re.compile(which)
        except re.error as error:
            raise ValueError(f"{name}: {which!r} is no regular expression: {error}.") from error
    elif not callable(which):
        raise TypeError(
            f"{name}: a group's variables are given by a regular expression or a function of the "
            f"variable, got {which!r}."
        )
