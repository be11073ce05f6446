"""Estimator's specs and configs as plain data, for TensorFlows without Estimator.

With them `mtf_gradsync.estimator.Estimator` runs a model_fn that was written for Estimator or
TPUEstimator. Fields and defaults are TensorFlow 2.15's.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Sequence


class ModeKeys:
    """Estimator's names of modes, which model functions compare strings with."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _EstimatorFields(NamedTuple):
    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Any = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[Any] = ()
    training_hooks: Sequence[Any] = ()
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()


class _TPUFields(NamedTuple):
    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metrics: Any = None
    export_outputs: Any = None
    scaffold_fn: Any = None
    host_call: Any = None
    training_hooks: Sequence[Any] = ()
    evaluation_hooks: Sequence[Any] = ()
    prediction_hooks: Sequence[Any] = ()


class _Spec:
    """A spec; making it raises ValueError if it lacks what its mode needs."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        needed = {
            ModeKeys.TRAIN: ("loss", "train_op"),
            ModeKeys.EVAL: ("loss",),
            ModeKeys.PREDICT: ("predictions",),
        }
        spec: Any = super().__new__(cls, *args, **kwargs)
        kind = cls.__name__
        if spec.mode not in needed:
            raise ValueError(f"mode of {kind} must be one of {list(needed)}, got {spec.mode!r}.")
        missing = [name for name in needed[spec.mode] if getattr(spec, name) is None]
        if missing:
            raise ValueError(f"{kind} of mode {spec.mode!r} needs {' and '.join(missing)}.")
        return spec


class EstimatorSpec(_Spec, _EstimatorFields):
    """The return value of a model_fn."""

    __slots__ = ()


class TPUEstimatorSpec(_Spec, _TPUFields):
    """The return value of a model_fn for TPUEstimator."""

    __slots__ = ()


class _Settings:
    """Settings by name, with defaults for those that a program does not give."""

    _defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **settings: Any):
        for name, value in {**self._defaults, **settings}.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class RunConfig(_Settings):
    """The settings of a program of Estimator."""

    _defaults = MappingProxyType(
        {
            "model_dir": None,
            "tf_random_seed": None,
            "save_summary_steps": 100,
            "save_checkpoints_steps": None,
            "save_checkpoints_secs": 600,
            "session_config": None,
            "keep_checkpoint_max": 5,
            "keep_checkpoint_every_n_hours": 10000,
            "log_step_count_steps": 100,
        }
    )

    def __init__(self, model_dir: str | None = None, **settings: Any):
        if settings.get("save_checkpoints_steps") is not None:
            settings.setdefault("save_checkpoints_secs", None)
        super().__init__(model_dir=model_dir, **settings)


class TPUConfig(_Settings):
    """The settings of a program on a TPU."""

    _defaults = MappingProxyType(
        {
            "iterations_per_loop": 2,
            "num_shards": None,
            "num_cores_per_replica": None,
            "per_host_input_for_training": True,
        }
    )

    def __init__(self, iterations_per_loop: int = 2, **settings: Any):
        super().__init__(iterations_per_loop=iterations_per_loop, **settings)


class TPURunConfig(RunConfig):
    """The settings of a program of TPUEstimator."""

    def __init__(
        self,
        tpu_config: Any = None,
        evaluation_master: Any = None,
        master: Any = None,
        cluster: Any = None,
        **settings: Any,
    ):
        super().__init__(
            tpu_config=tpu_config or TPUConfig(),
            evaluation_master=evaluation_master,
            master=master,
            cluster=cluster,
            **settings,
        )


class WarmStartSettings(NamedTuple):
    """Where variables get their first values from, and which of them."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: Any = None
    var_name_to_prev_var_name: Any = None


class PredictOutput(NamedTuple):
    """The predictions of an exported model."""

    outputs: Any


class ServingInputReceiver(NamedTuple):
    """The inputs of an exported model: features for the model_fn, and tensors to feed."""

    features: Any
    receiver_tensors: Any
