"""Checks of the argument `opt` of wrappers, also for optimizers of `tf.compat.v1`."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Iterable,
    Literal,
    NoReturn,
    Protocol,
    Sequence,
    Union,
)

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import optimizers_inside


class AppliesGradients(Protocol):
    """An optimizer that updates mesh variables, such as one of `mtf.optimize`."""

    def apply_grads(self, grads: Any, variables: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Updates each of `variables` by the gradient at the same place in `grads`.

        Returns a list of mtf operations.
        """


class V1Optimizer(Protocol):
    """The methods of an optimizer of `tf.compat.v1.train` that wrappers call."""

    def compute_gradients(self, loss: Any, /) -> Any:
        """Returns pairs (gradient, variable) for a loss, a tf scalar."""

    def apply_gradients(self, grads_and_vars: Any, /) -> Any:
        """Updates the variable of each pair (gradient, variable); returns a tf operation."""


#: What a user gives a wrapper: an optimizer, or a class or factory of one.
MeshOptimizerLike = Union[AppliesGradients, Callable[..., AppliesGradients]]
V1OptimizerLike = Union[V1Optimizer, Callable[..., V1Optimizer]]
OptimizerLike = Union[MeshOptimizerLike, V1OptimizerLike]
#: Gets the sums of gradients and their variables; returns what takes the place of the sums.
AllReduceFn = Callable[["list[tf.Tensor]", "list[Any]"], "Sequence[tf.Tensor]"]
#: `tf.compat.v1.losses.Reduction.SUM` and `.MEAN`.
Reduction = Literal["weighted_sum", "weighted_mean"]
# The default of learning_rate arguments: None is a learning rate that pipelines pass on.
NOT_GIVEN = object()
# By name of a Keras class: the class of tf.compat.v1.train, if it is not called <name>Optimizer.
_V1_NAMES = {"SGD": "MomentumOptimizer", "RMSprop": "RMSPropOptimizer"}


def is_v1(optimizer: Any) -> bool:
    """Returns whether an object is a ``tf.compat.v1.train.Optimizer``."""
    return isinstance(optimizer, tf.train.Optimizer)


def given_optimizer(opt: Any, learning_rate: Any, wrapper: str) -> Any:
    """Returns the optimizer `opt`, or the one that the class or factory `opt` makes.

    Args:
      opt: an optimizer with ``apply_grads``, one of ``tf.compat.v1.train``, or a class or factory
        of either.
      learning_rate: the learning rate that a class or factory is called with, or `NOT_GIVEN`.
      wrapper: name of the wrapper, for errors.

    Returns:
      The optimizer.

    Raises:
      TypeError: opt is, or makes, a Keras optimizer.
      ValueError: opt is no optimizer, class or factory. Or it is a class or factory, but
        learning_rate is not given. Or it is an optimizer, which has its learning rate already, but
        learning_rate is given.
    """
    _refuse_keras(opt, wrapper)
    if not isinstance(opt, type) and _is_optimizer(opt):
        if learning_rate is not NOT_GIVEN and learning_rate is not None:
            raise ValueError(
                f"{wrapper} got the optimizer {opt!r}, which has its learning rate already, and "
                f"learning_rate={learning_rate!r}. Give a class (in gin: "
                f"`{wrapper}.opt = @AdafactorOptimizer`, without parentheses), or give no "
                "learning_rate."
            )
        return opt
    if not callable(opt) or (isinstance(opt, type) and not _is_optimizer(opt)):
        raise ValueError(
            f"opt must be an optimizer with apply_grads(grads, variables), such as one of "
            f"mtf.optimize, or a class or factory of one, got {opt!r}."
        )
    if learning_rate is NOT_GIVEN:
        raise ValueError(
            f"{wrapper} got the class or factory {opt!r} as opt: give learning_rate too, which "
            "it is called with, or give an optimizer instead."
        )
    made = opt(learning_rate=learning_rate)
    _refuse_keras(made, wrapper)
    if isinstance(made, type) or not _is_optimizer(made):
        raise ValueError(
            f"opt={opt!r} must make an optimizer with apply_grads(grads, variables), but made "
            f"{made!r}."
        )
    return made


def refuse_with_v1(opt: Any, **arguments: Any) -> None:
    """Raises ValueError if one of `arguments`, which only mesh optimizers have, is not None.

    `opt` is the TensorFlow optimizer that is to be wrapped; the error shows it.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} goes with mesh optimizers, not with the TensorFlow optimizer {opt!r}."
            )


def _is_optimizer(opt: Any) -> bool:
    cls = opt if isinstance(opt, type) else type(opt)
    return callable(getattr(opt, "apply_grads", None)) or issubclass(cls, tf.train.Optimizer)


def _refuse_keras(opt: Any, wrapper: str) -> None:
    cls = opt if isinstance(opt, type) else type(opt)
    # Keras is not imported for this check: its classes are known by where they were defined.
    is_keras = any(
        base.__name__ in ("Optimizer", "OptimizerV2", "BaseOptimizer", "LossScaleOptimizer")
        and "keras" in base.__module__
        for base in cls.__mro__
    )
    if not is_keras:
        return
    name = _V1_NAMES.get(cls.__name__, f"{cls.__name__}Optimizer")
    name = name if hasattr(tf.train, name) else "AdamOptimizer"
    raise TypeError(
        f"{wrapper} does not work with Keras optimizers (OptimizerV2), got {opt!r}. Use a "
        "Mesh-TensorFlow optimizer, for example mtf.optimize.AdafactorOptimizer or "
        f"mtf.optimize.AdamWeightDecayOptimizer, or gs.MeshOptimizer(tf.compat.v1.train.{name}"
        f"(...)); without a mesh, tf.compat.v1.train.{name}."
    )


class OffMesh:
    """A mixin for optimizers of tf.compat.v1 that raises TypeError for mesh tensors and variables.

    A subclass lists this mixin before TensorFlow's class among its bases, so that the methods of
    the mixin check arguments before they call TensorFlow's methods.
    """

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns pairs (gradient, variable), as TensorFlow's optimizer computes them for `loss`.

        All arguments are those of `tf.compat.v1.train.Optimizer.compute_gradients`. Raises
        TypeError if the loss or a variable is one of Mesh-TensorFlow.
        """
        self._refuse_mesh(loss, args, kwargs)
        return super().compute_gradients(loss, *args, **kwargs)  # type: ignore[misc] # TensorFlow's

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any
    ) -> tf.Operation:
        """Returns the tf operation by which TensorFlow's optimizer makes an update.

        All arguments are those of `tf.compat.v1.train.Optimizer.apply_gradients`. Raises TypeError
        if a gradient or variable is one of Mesh-TensorFlow.
        """
        pairs = list(grads_and_vars)
        self._refuse_mesh(pairs, args, kwargs)
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc] # TensorFlow's

    @property
    def apply_grads(self) -> NoReturn:
        """Raises an AttributeError with a remedy: only mesh optimizers have this method."""
        raise AttributeError(f"{self._kind()} has no apply_grads. {self._instead()}")

    def _refuse_mesh(self, *given: Any) -> None:
        for one in tf.nest.flatten(given):
            if isinstance(one, (mtf.Tensor, mtf.Variable)):
                raise TypeError(f"{self._kind()} cannot take {one!r}. {self._instead()}")

    def _kind(self) -> str:
        return f"{type(self).__name__} around an optimizer of tf.compat.v1.train"

    def _instead(self) -> str:
        inner = type(optimizers_inside(self)[-1]).__name__
        return (
            "This optimizer updates variables of TensorFlow. To update variables of a mesh, give "
            f"gs.{type(self).__name__} a mesh optimizer in place of {inner}: "
            f"gs.MeshOptimizer({inner}(...)), or one of mtf.optimize."
        )
