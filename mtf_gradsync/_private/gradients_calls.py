"""Records the calls of `mtf.gradients`, which Mesh-TF 0.1.21 does not."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import lowered_on
from mtf_gradsync._private.patches import patch


class Seed(mtf.Constant):
    """The gradient of a loss by itself, with which `mtf.gradients` begins: ones.

    Attributes:
      scale: the factor that multiplies them: None, a number or an mtf scalar.
      rounded: rounds a scale to a number that every other loss's dtype can hold.
    """

    scale: Any = None
    rounded: Callable[[tf.Tensor], tf.Tensor] = staticmethod(tf.identity)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        super().lower(lowering)
        if self.scale is None:
            return
        (ones,) = self.outputs
        value, mesh_impl = lowering.tensors[ones].to_laid_out_tensor(), lowering.mesh_impl(self)
        if isinstance(self.scale, mtf.Tensor):
            scale = lowered_on(lowering, self.scale, self.mesh)
            value = mesh_impl.slicewise(self._scaled, value, scale)
        else:
            value = mesh_impl.slicewise(lambda x: self._scaled(x, tf.constant(self.scale)), value)
        lowering.set_tensor_lowering(ones, value)

    def _scaled(self, ones: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        return ones * tf.cast(self.rounded(scale), ones.dtype)


class GradientsCall(NamedTuple):
    """A call of `mtf.gradients` that began with ones.

    Attributes:
      losses: the differentiated tensors.
      seeds: one for each loss.
      outputs: the gradients, without those that are None.
      inputs: for each gradient the tensor that it is the gradient by.
    """

    losses: list[mtf.Tensor]
    seeds: list[Seed]
    outputs: list[mtf.Tensor]
    inputs: list[mtf.Tensor]


# The attribute of an mtf graph for its `GradientsCall`s.
_CALLS = "mtf_gradsync_gradients"


def note_gradients() -> None:
    """Makes every mtf graph record the losses differentiated in it; see `gradients_calls`."""

    def with_note(gradients: Any) -> Any:
        def differentiate_and_note(
            ys: list[mtf.Tensor],
            xs: list[mtf.Tensor],
            grad_ys: list[mtf.Tensor] | None = None,
            operations: list[mtf.Operation] | None = None,
        ) -> list[mtf.Tensor | None]:
            if grad_ys:
                return gradients(ys, xs, grad_ys, operations)
            seeds = [Seed(y.mesh, 1.0, y.shape, y.dtype) for y in ys]
            grads = gradients(ys, xs, [seed.outputs[0] for seed in seeds], operations)
            pairs = [(g, x) for g, x in zip(grads, xs) if g is not None]
            call = GradientsCall(list(ys), seeds, [g for g, _ in pairs], [x for _, x in pairs])
            vars(ys[0].graph).setdefault(_CALLS, []).append(call)
            return grads

        return differentiate_and_note

    for module in (mtf, mtf.ops):
        patch(module, "gradients", with_note)


def gradients_calls(graph: mtf.Graph) -> list[GradientsCall]:
    """Returns the calls of `mtf.gradients` in a graph, and in the loops in it, in order."""
    return list(vars(graph).get(_CALLS, ()))
