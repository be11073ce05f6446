"""Builds the graph of a call of Estimator from input_fn and model_fn, for a runtime."""

from __future__ import annotations

import copy
from typing import Any, Callable, Mapping, NamedTuple

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.estimator.inputs import call_with_named, features_and_labels, set_items
from mtf_gradsync.estimator.meshes import outside_programs
from mtf_gradsync.runtimes.saving import RunSaver
from mtf_gradsync.runtimes.sessions import OnCores, OnDevices

_TRAIN = tf.estimator.ModeKeys.TRAIN


class ModelFn(NamedTuple):
    """A model_fn, and what its params get besides the caller's items.

    `batch_sizes` has the value of params["batch_size"] for each mode, None for no change. With
    `is_for_tpu` params always get "use_tpu", as from TPUEstimator, otherwise only in a program.
    """

    function: Callable[..., Any]
    is_for_tpu: bool
    batch_sizes: Mapping[str, int | None]

    def build(
        self,
        input_fn: Callable[..., Any],
        mode: str,
        place: OnDevices | OnCores,
        params: Any,
        config: Any,
    ) -> tuple[Any, tf.train.Scaffold | None, list[Any]]:
        """Builds a step in the default graph, for the mode "train", "eval" or "infer".

        Returns the spec, its scaffold, and hooks that the input needs.
        """
        is_program = isinstance(place, OnCores)
        # A program cannot write a ref variable, as all are in a TensorFlow 1 program.
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope, use_resource=is_program or scope.use_resource):
            tf.train.get_or_create_global_step()
        params = self._params(params, mode, is_program)
        features, labels, hooks = features_and_labels(input_fn, mode, params, config)
        with place.building() as program:
            if program is not None:
                set_items(params, context=program.tpu_context)
            spec, scaffold = self._call(features, labels, mode, params, config)
        has_saver = scaffold is not None and scaffold.saver is not None
        if mode == _TRAIN and not has_saver and not tf.get_collection(tf.GraphKeys.SAVERS):
            keep = getattr(config, "keep_checkpoint_max", None) or 0
            saver = RunSaver(var_list=None, sharded=True, max_to_keep=keep)
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        return spec, scaffold, hooks

    def spec(
        self, features: Any, labels: Any, mode: str, params: Any, config: Any
    ) -> tuple[Any, tf.train.Scaffold | None]:
        """Returns the spec and its scaffold, on devices, for a model that is exported."""
        return self._call(features, labels, mode, self._params(params, None, False), config)

    def _params(self, params: Any, mode: str | None, is_program: bool) -> Any:
        """Returns a copy of the params with the additions of TPUEstimator."""
        params = copy.deepcopy(params) if params is not None else {}
        batch_size = self.batch_sizes.get(mode or "")
        if batch_size is not None:
            set_items(params, batch_size=batch_size)
        # Estimator alone, without a TPU's config, adds nothing.
        if is_program or self.is_for_tpu:
            set_items(params, use_tpu=is_program)
        return params

    def _call(
        self, features: Any, labels: Any, mode: str, params: Any, config: Any
    ) -> tuple[Any, tf.train.Scaffold | None]:
        """Calls the model_fn; returns its spec and the spec's scaffold."""
        tf.train.get_or_create_global_step()
        spec = call_with_named(
            self.function,
            features=features,
            labels=labels,
            mode=mode,
            params=params,
            config=config,
        )
        if not hasattr(spec, "train_op"):
            raise TypeError(
                "model_fn must return an EstimatorSpec or a TPUEstimatorSpec, got "
                f"{type(spec).__name__}."
            )
        scaffold_fn = getattr(spec, "scaffold_fn", None)
        with outside_programs():
            scaffold = scaffold_fn() if scaffold_fn else getattr(spec, "scaffold", None)
        return spec, scaffold
