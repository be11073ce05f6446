"""Calls an input_fn and a model_fn as TensorFlow's Estimators do, and uses the resulting spec.

The class `ModelFn` builds a step for a runtime. The function `examples` splits predictions into
examples. The function `write_saved_model` writes a model as a SavedModel, which can be loaded
without this package and without the devices of a mesh.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import time
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import did_you_mean, some_of, tf, warn_of_unmatched
from mtf_gradsync.runtimes.sessions import OnCores, OnDevices
from mtf_gradsync.tools.estimator.hooks import add_saver


class ModelFn(NamedTuple):
    """A model_fn, the caller's params and RunConfig, and the items that are added to the params.

    The model_fn gets a copy of `params`. `batch_sizes` has, for each mode, the value that
    params["batch_size"] gets; if this value is None, the item "batch_size" is not added. If
    `is_for_tpu` is set, the item "use_tpu" is always added, as TPUEstimator adds it. If
    `is_for_tpu` is not set, "use_tpu" is added only in a SIMD program.
    """

    function: Callable[..., Any]
    params: Any
    config: Any
    is_for_tpu: bool
    batch_sizes: Mapping[str, int | None]

    def build(
        self, input_fn: Callable[..., Any], mode: str, place: OnDevices | OnCores
    ) -> tuple[Any, tf.train.Scaffold | None, list[Any]]:
        """Builds the input and the model of a step in the default graph.

        Args:
          input_fn: a function that returns the batches, in any form that `Estimator.train` takes.
          mode: "train", "eval" or "infer".
          place: where the step runs: on devices, or on the cores of a SIMD program.

        Returns:
          Three values: the spec that the model_fn returned; the spec's scaffold, or None; and the
          session hooks that the input needs.
        """
        is_program = isinstance(place, OnCores)
        # A program cannot write a ref variable, as all are in a TensorFlow 1 program.
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope, use_resource=is_program or scope.use_resource):
            tf.train.get_or_create_global_step()
        params = self._params(mode, is_program)
        features, labels, hooks = features_and_labels(input_fn, mode, params, self.config)
        with place.building() as program:
            if program is not None:
                _set_items(params, context=program.tpu_context)
            spec, scaffold = self._call_model_fn(features, labels, mode, params)
        has_saver = scaffold is not None and scaffold.saver is not None
        is_training = mode == tf.estimator.ModeKeys.TRAIN
        if is_training and not has_saver and not tf.get_collection(tf.GraphKeys.SAVERS):
            add_saver(self.config, var_list=None)
        return spec, scaffold, hooks

    def build_on_devices(self, features: Any, labels: Any, mode: str) -> Any:
        """Calls the model_fn to build a model on devices, and returns its spec.

        `features` and `labels` are tensors of a batch, and `mode` is "train", "eval" or "infer".
        The model_fn gets the params with the items that TPUEstimator would add, such as
        "batch_size".
        """
        return self._call_model_fn(features, labels, mode, self._params(mode, False))[0]

    def build_to_export(self, features: Any) -> tuple[Any, tf.train.Scaffold | None]:
        """Calls the model_fn to build a model to export, which predicts, on devices.

        Returns the spec of the model_fn, and the spec's scaffold, or None if the spec has no
        scaffold. `features` are the tensors that the model reads. The model_fn gets the params,
        to which no "batch_size" is added.
        """
        mode = tf.estimator.ModeKeys.PREDICT
        return self._call_model_fn(features, None, mode, self._params(None, False))

    def _params(self, mode: str | None, is_program: bool) -> Any:
        """Returns a copy of the params, with the items that TPUEstimator would add.

        The item "batch_size" is added if `batch_sizes` has a number for `mode`; if `mode` is None,
        the item is not added. The value of the item "use_tpu" is `is_program`, which says whether
        the model is a SIMD program.
        """
        params = copy.deepcopy(self.params) if self.params is not None else {}
        batch_size = self.batch_sizes.get(mode or "")
        if batch_size is not None:
            _set_items(params, batch_size=batch_size)
        # Estimator alone, without a TPU's config, adds nothing.
        if is_program or self.is_for_tpu:
            _set_items(params, use_tpu=is_program)
        return params

    def _call_model_fn(
        self, features: Any, labels: Any, mode: str, params: Any
    ) -> tuple[Any, tf.train.Scaffold | None]:
        """Calls the model_fn with these arguments; returns its spec, and the scaffold or None.

        `features` and `labels` are the tensors that the model reads, `mode` is "train", "eval" or
        "infer", and `params` is a result of `_params`. Raises TypeError if the model_fn returns
        something that is no spec.
        """
        tf.train.get_or_create_global_step()
        given = {"features": features, "labels": labels, "mode": mode}
        spec = _call_with_named(self.function, **given, params=params, config=self.config)
        if not hasattr(spec, "train_op"):
            raise TypeError(
                "model_fn must return an EstimatorSpec or a TPUEstimatorSpec, got "
                f"{type(spec).__name__}."
            )
        scaffold_fn = getattr(spec, "scaffold_fn", None)
        # Outside of the program that is being built.
        with tf.control_dependencies(None):
            scaffold = scaffold_fn() if scaffold_fn else getattr(spec, "scaffold", None)
        return spec, scaffold


class _InitializeIterator(tf.train.SessionRunHook):
    """A hook that initializes the iterator of a step's input in every new session."""

    def __init__(self, initializer: tf.Operation):
        self._initializer = initializer

    def after_create_session(self, session: Any, coord: Any) -> None:
        del coord
        session.run(self._initializer)


def features_and_labels(
    input_fn: Callable[..., Any], mode: str, params: Any, config: Any
) -> tuple[Any, Any, list[tf.train.SessionRunHook]]:
    """Calls an input_fn; returns a step's features, its labels or None, and the input's hooks.

    The input_fn may take any of the arguments `mode`, `params` and `config`, by name. The input_fn
    returns a `tf.data.Dataset` of features or of (features, labels), or it returns features or
    (features, labels) as tensors. The session of the step has to run with the input's hooks, which
    initialize the iterator of the Dataset. Raises TypeError if the input_fn returns something else
    than these.
    """
    result = _call_with_named(input_fn, mode=mode, params=params, config=config)
    hooks: list[tf.train.SessionRunHook] = []
    if isinstance(result, (tf.data.Dataset, tf.compat.v2.data.Dataset)):
        iterator = tf.data.make_initializable_iterator(result)
        hooks.append(_InitializeIterator(iterator.initializer))
        result = iterator.get_next()
    if isinstance(result, (list, tuple)):
        if len(result) != 2:
            raise TypeError(
                "input_fn must give features, or a pair of features and labels, got "
                f"{len(result)} elements."
            )
        return result[0], result[1], hooks
    if result is None:
        raise TypeError("input_fn must return a Dataset or tensors, got None.")
    return result, None, hooks


@contextlib.contextmanager
def naming_uneven_batches(input_fn: Callable[..., Any]) -> Iterator[None]:
    """Raises a ValueError in place of TensorFlow's error if a batch has the wrong size.

    The steps run inside the ``with`` block. The ValueError says what to do, and names `input_fn`,
    the function that gives the batches.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        # What Mesh-TF imports is checked so, see `_private.mesh_tensorflow`.
        if error.op is None or error.op.type != "EnsureShape":
            raise
        expected = tf.TensorShape(error.op.get_attr("shape")).as_list()
        raise ValueError(
            f"{name_of(input_fn)} gave a batch of another size: the model takes an input of the "
            f"shape {expected}. Where the last batch of a Dataset is shorter, drop it, by "
            "batch(size, drop_remainder=True), or pad it: to keep its examples, fill it up and "
            "give the rows that were added a weight of 0 in the loss and the metrics."
        ) from error


def name_of(fn: Callable[..., Any]) -> str:
    """Returns a function's qualified name for messages, or its repr if it has none."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def warm_start_settings(given: Any) -> tuple[Any, ...] | None:
    """Returns the positional arguments of `tf.train.warm_start` for a user's warm_start_from.

    `given` is what the user gave as warm_start_from: a path, WarmStartSettings or None. If `given`
    is None, the result is None. Raises TypeError if `given` is something else.
    """
    if given is None:
        return None
    if hasattr(given, "ckpt_to_initialize_from"):
        return tuple(given)
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            "warm_start_from must be the path of a checkpoint, of its directory or of a "
            f"SavedModel, or tf.estimator.WarmStartSettings; got {given!r}."
        )
    path = os.fspath(given)
    variables = os.path.join(path, "variables", "variables")
    return (variables if tf.io.gfile.exists(f"{variables}.index") else path, ".*", None, None)


def checkpoint_to_warm_start(path: str) -> str:
    """Returns the path of the checkpoint to start from; `path` may be its directory.

    Raises ValueError if there is no checkpoint at `path`.
    """
    found = tf.train.latest_checkpoint(path) if tf.io.gfile.isdir(path) else path
    if not found or not tf.train.checkpoint_exists(found):
        raise ValueError(f"warm_start_from: {path!r} is no checkpoint, and no directory with one.")
    return found


def warm_start(settings: Sequence[Any]) -> None:
    """Makes a checkpoint's values the initial values of variables of the default graph.

    `settings` are the result of `warm_start_settings`: the checkpoint, and which variables are
    taken from it. Slices (the parts of variables that processors hold) are not in checkpoints, so
    they get copies of the variables' values. Raises ValueError if the settings choose no variable.
    """
    path, chosen, vocabularies, earlier_names = settings
    masters = {id(v) for v in tf.global_variables()}
    names = [v.op.name for v in tf.trainable_variables() if id(v) in masters]
    given = [chosen] if isinstance(chosen, str) else chosen or ()
    patterns = [x for x in given if isinstance(x, str) and x != ".*"]
    if isinstance(chosen, str):
        found = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope=chosen)
        chosen = [v for v in found if id(v) in masters]
    if not chosen and not vocabularies:
        hint = did_you_mean(patterns[0], names) if patterns else ""
        raise ValueError(
            f"warm_start_from: vars_to_warm_start = {settings[1]!r} chooses no variable; names "
            f"look like {some_of(names)}{hint or '.'}"
        )
    warn_of_unmatched("warm_start_from: vars_to_warm_start", patterns, names, re.match)
    tf.train.warm_start(path, chosen, vocabularies, earlier_names)


def _call_with_named(fn: Callable[..., Any], **known: Any) -> Any:
    """Calls `fn` with those of the `known` arguments that its signature names; returns its result.

    If `fn` is a ``functools.partial`` that has some of the `known` arguments already, it keeps its
    own values of these.
    """
    # Arguments that a partial function has already are not replaced.
    held = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    names = set(inspect.signature(fn).parameters) - held
    return fn(**{name: value for name, value in known.items() if name in names})


def _set_items(params: Any, **items: Any) -> None:
    """Adds items to params in place: to a dict, or as attributes of an object.

    Raises TypeError if `params` is no dict and its attributes cannot be set.
    """
    for name, value in items.items():
        try:
            if hasattr(params, "__setitem__"):
                params[name] = value
            else:
                setattr(params, name, value)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"params must be a dict, or an object whose attributes can be set, so that it can "
                f"be given {name!r}; got {params!r}."
            ) from error


def select_predictions(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    """Selects predictions by their names; returns a dictionary from these names to tensors.

    `predictions` is a dictionary from names to tensors, or a single tensor. `keys` are the names to
    select, or one name; None returns `predictions` unchanged. Raises ValueError if `predictions`
    lacks a name, or if it is a single tensor and `keys` are given.
    """
    if keys is None:
        return predictions
    keys = [keys] if isinstance(keys, str) else list(keys)
    has = list(predictions) if isinstance(predictions, dict) else []
    missing = [key for key in keys if key not in has]
    if missing:
        raise ValueError(f"predict_keys has {missing}; the model predicts {has}.")
    return {key: predictions[key] for key in keys}


def examples(batch: Any) -> Iterator[Any]:
    """Yields the examples of a batch one by one.

    If `batch` is an array, the examples are the rows of the array. If `batch` is a dict of arrays,
    each example is a dict with one row of each array.

    Raises ValueError if `batch` is a dict whose arrays differ in length.
    """
    if not isinstance(batch, dict):
        yield from batch
        return
    lengths = {name: len(values) for name, values in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"Predictions of a batch must have one row for each example, got {lengths}; "
            "yield_single_examples=False yields batches as they are."
        )
    for number in range(next(iter(lengths.values()))):
        yield {name: values[number] for name, values in batch.items()}


def write_saved_model(
    base: str,
    spec: Any,
    scaffold: tf.train.Scaffold | None,
    inputs: Mapping[str, tf.Tensor],
    checkpoint: str,
    assets_extra: Mapping[str, str] | None = None,
    as_text: bool = False,
) -> str:
    """Writes the default graph with a checkpoint's values to a new directory; returns its path.

    Args:
      base: the parent of the new directory, which is named by the time in seconds, so that newer
        names sort last.
      spec: the model's spec, with the outputs to export.
      scaffold: the spec's scaffold, or None; a server runs its local_init_op when it loads the
        model.
      inputs: the tensors that a server feeds, by name.
      checkpoint: the path of the checkpoint.
      assets_extra: files to copy into the directory "assets.extra", as a dictionary from the name
        that a copy gets to the path of the file; None for none.
      as_text: whether to write the graph as text.
    """
    while tf.io.gfile.exists(directory := os.path.join(base, str(int(time.time())))):
        time.sleep(1)
    saver = tf.train.Saver(sharded=True)
    begin = scaffold.local_init_op if scaffold else None
    if begin is None:
        begin = tf.train.Scaffold.default_local_init_op()
    signatures = {}
    for name, output in (spec.export_outputs or {"serving_default": spec.predictions}).items():
        outputs = getattr(output, "outputs", output)
        by_name = dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}
        signatures[name] = tf.saved_model.predict_signature_def(dict(inputs), by_name)
    builder = tf.saved_model.Builder(directory)
    with tf.Session() as session:
        saver.restore(session, checkpoint)
        session.run(begin)
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.SERVING],
            signature_def_map=signatures,
            main_op=begin,
            saver=saver,
            strip_default_attrs=True,
        )
    builder.save(as_text=as_text)
    for name, source in (assets_extra or {}).items():
        target = os.path.join(directory, "assets.extra", name)
        tf.io.gfile.makedirs(os.path.dirname(target))
        tf.io.gfile.copy(source, target)
    return directory
