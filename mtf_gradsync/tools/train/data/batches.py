"""Draws the batches of a training run outside of the training step, and checks them.

A session of its own takes each batch from the data set; the batch is then fed to the training step.
So an error while a batch is taken occurs before any part of the step has run. On every runtime it
is reported as an error of the data.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import inspect
import sys
from typing import Any, Callable, ContextManager, Mapping

import numpy as np
from tqdm import tqdm

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError, first_line
from mtf_gradsync.tools.islands.elastic import ALL_DATA, DataPart
from mtf_gradsync.tools.train.data.datasets import MODEL_FEATURES, mapped


class DataError(TrainingError):
    """The error of a step that has no batch, or a batch that the model cannot train on."""


_FUNCTION = "train.run.train_dataset_fn"
# Length of the shape vector of an example of unknown shape: its rank, then its dimensions.
_DIMS_SHOWN = 3


_SECONDS_BETWEEN_LOOKS = 2.0
_SKIPPING = (
    f"the data set draws the {{:,}} examples of the steps before, and drops them. If "
    f"{_FUNCTION} had an argument `start`, it would begin at the right example at once"
)


class TrainingBatches(ContextManager["TrainingBatches"]):
    """A context manager that draws the batches of a run, one for each step.

    When the run's data set has ended, it is repeated. A data set also ends if one of its functions
    raises StopIteration.

    Attributes:
      targets: how many targets of the newest batch count in the loss: the targets that are not
        padding.
    """

    targets = 0

    def __init__(
        self,
        make_dataset: Callable[..., tf.data.Dataset],
        batch_size: int,
        feature_length: Callable[[str], int],
        vocab_sizes: Mapping[str, int],
        wanted: Callable[[str], bool] = lambda name: True,
        seed: int = 0,
        part: DataPart = ALL_DATA,
    ):
        """Makes the data set, of single examples: vectors of integers by feature name.

        Args:
          make_dataset: a function that returns the data set. If it has an argument `start`, an
            int64 scalar, it has to return the examples from that number on, counted from 0, without
            end. Without this argument, a run that goes on draws the earlier examples again and
            drops them, with a progress bar. If it has the arguments `part` and `parts`, it has to
            return every `parts`-th example, beginning with example `part`. If it lacks these two
            arguments, its data set is repeated, and every `parts`-th example of it is taken.
          batch_size: the number of examples in a batch.
          feature_length: a function that gets a feature's name and returns the feature's length.
          vocab_sizes: the number of ids in the vocabulary of each feature that holds ids, by name.
          wanted: a function that gets a feature's name and returns whether the model reads the
            feature. Other features are dropped.
          seed: the seed of TensorFlow operations without their own, so that a data set is shuffled
            in the same order each time.
          part: the part of the data to take examples from.
        """
        self._feature_length, self._vocab_sizes = feature_length, vocab_sizes
        self._first = self._step = self._examples = 0
        self._begun = False
        self._first_examples: list[str] = []
        self._feeds: dict[str, tf.Tensor] = {}
        with tf.Graph().as_default() as graph:
            tf.set_random_seed(seed)
            self._drawn: tf.Variable | None = None
            taken = inspect.signature(make_dataset).parameters
            takes_start, takes_part = "start" in taken, {"part", "parts"} <= set(taken)
            given: dict[str, Any] = part._asdict() if takes_part else {}
            cuts = part.parts > 1 and not takes_part
            if takes_start:
                self._skipped = tf.placeholder(tf.int64, [])
                start = self._skipped * part.parts if cuts else self._skipped
                dataset = make_dataset(start=start, **given)
            else:
                # First, since the seeds of its operations depend on how many there are before.
                dataset = make_dataset(**given)
                self._skipped = tf.placeholder(tf.int64, [])
            specs = _feature_specs(dataset, wanted)
            self._shapes = {
                name: [batch_size, *(spec.shape.as_list() if _is_known(spec) else [-1])]
                for name, spec in specs.items()
            }
            for name, shape in self._shapes.items():
                if shape[1:] == [-1]:
                    shape[1] = feature_length(name)
            size = tf.data.experimental.cardinality(dataset)
            # Examples are skipped, not batches, which may have had another size.
            rest = dataset if takes_start else dataset.repeat()
            if cuts:
                rest = rest.shard(part.parts, part.part)
            rest = rest if takes_start else self._skip_used_examples(rest)
            rest = mapped(rest, lambda example: self._fit_example(example, specs))
            batches = rest.batch(batch_size, drop_remainder=True).prefetch(2)
            iterator = tf.data.make_initializable_iterator(batches)
            self._next = iterator.get_next()
            self._initialize = [tf.tables_initializer(), iterator.initializer]
            if self._drawn is not None:
                self._initialize.append(self._drawn.initializer)
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={"GPU": 0}))
        if self._session.run(size, {self._skipped: 0}) == 0:
            self._session.close()
            raise ConfigError(f"{_FUNCTION} gives an empty data set")

    def __exit__(self, *unused_exception: Any) -> None:
        self._session.close()

    def placeholders(self) -> dict[str, tf.Tensor]:
        """Adds placeholders to the default graph, int32 ``[batch_size, length]`` by feature."""
        self._feeds = {
            name: tf.placeholder(tf.int32, shape, name=name) for name, shape in self._shapes.items()
        }
        return self._feeds

    def begin(self, step: int, examples: int) -> None:
        """Lets the batches begin after `step` steps, in which the run used `examples` examples."""
        self._first = self._step = step
        self._examples = examples
        self._begun = False

    def next(self) -> dict[tf.Tensor, np.ndarray]:
        """Draws the next step's batch, as a feed dict of the placeholders that were made last.

        Raises DataError if the data set has no further batch, or if the model cannot train on the
        batch.
        """
        step = self._step + 1
        try:
            features, shapes = self._draw_batch()
        except tf.errors.OutOfRangeError as error:
            raise DataError(self._at_the_end(step)) from error
        except tf.errors.OpError as error:
            raise DataError(
                f"{_FUNCTION}: its data set raised an error in the batch of step {step}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        for name, given in shapes.items():
            self._check_shapes(step, name, given)
        for name, ids in features.items():
            self._check_ids(step, name, ids)
        self._step = step
        self.targets = int(np.count_nonzero(features["targets"] > 0))
        return {feed: features[name].astype(np.int32) for name, feed in self._feeds.items()}

    def _skip_used_examples(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns `dataset` without its first examples, which the run has used before.

        The number of these examples is fed when the data set's iterator begins. For the progress
        bar, the variable `_drawn` counts all examples that are taken from `dataset`, also skipped
        ones.
        """
        self._drawn = drawn = tf.get_variable(
            "mtf_gradsync/drawn",
            [],
            tf.int64,
            tf.zeros_initializer(),
            trainable=False,
            use_resource=True,
        )

        def counted(example: Any) -> Any:
            with tf.control_dependencies([drawn.assign_add(1, read_value=False)]):
                return tf.nest.map_structure(tf.identity, example)

        return mapped(dataset, counted).skip(self._skipped)

    def _draw_first_batch(self) -> Any:
        """Draws and returns the session's first batch, in the form that `_draw_batch` returns.

        If drawing the first batch takes long, a progress bar shows how many examples are skipped so
        far.
        """
        if self._drawn is None or not self._examples:
            return self._session.run(self._next)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            batch = pool.submit(self._session.run, self._next)
            bar: Any = None
            while concurrent.futures.wait([batch], _SECONDS_BETWEEN_LOOKS).not_done:
                if bar is None:
                    bar = tqdm(total=self._examples, unit=" examples", desc="skipping", leave=False)
                    bar.write(_SKIPPING.format(self._examples), file=sys.stderr)
                drawn = int(self._session.run(self._drawn))
                bar.update(min(drawn, self._examples) - bar.n)
            if bar is not None:
                bar.close()
            return batch.result()

    def first_examples(self) -> list[str]:
        """Returns short hashes of the first few examples of the data set.

        Before the session has drawn a batch, `first_examples` draws the data set's first examples
        and returns their hashes. After the session has drawn a batch, `first_examples` returns
        hashes of the session's first batch, if this was also the first batch of the run. If it was
        not, or if examples cannot be drawn, the list is empty.
        """
        if not self._first_examples and not self._begun:
            examples, self._examples = self._examples, 0
            with contextlib.suppress(tf.errors.OpError):
                self._draw_batch()
            self._examples, self._begun = examples, False
        return self._first_examples

    def _draw_batch(self) -> Any:
        """Draws the next batch; returns its features, and the shapes that features had at first.

        Both results are dictionaries from feature name to a numpy array with a row for each example
        of the batch. The shapes are those that features had before `_fit_example` padded or cut
        them.
        """
        if self._begun:
            return self._session.run(self._next)
        self._session.run(self._initialize, {self._skipped: self._examples})
        self._begun = True
        features, shapes = self._draw_first_batch()
        if not self._examples:
            self._first_examples = _example_hashes(features)
        return features, shapes

    def _fit_example(
        self, example: dict[str, tf.Tensor], specs: dict[str, Any]
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Gives each feature of an example the length that the model wants, by padding or cutting.

        `specs` has the `tf.TensorSpec` of each feature of `example`. A feature whose `TensorSpec`
        has a shape is not changed.

        Returns:
          A pair: the features by name, and the shapes of the changed features before the change, by
          name. From a shape, a wrong feature is found when the batch is drawn. A shape is a vector
          of the rank and the first three dimensions; -1 stands for a dimension that the feature did
          not have.
        """
        features, shapes = {}, {}
        for name, spec in specs.items():
            x = example[name]
            if not _is_known(spec):
                given = tf.concat([[tf.rank(x)], tf.shape(x), [-1] * _DIMS_SHOWN], axis=0)
                shapes[name] = given[: 1 + _DIMS_SHOWN]
                length = self._feature_length(name)
                x = tf.reshape(x, [-1])[:length]
                x = tf.reshape(tf.pad(x, [[0, length - tf.size(x)]]), [length])
            features[name] = x
        return features, shapes

    def _at_the_end(self, step: int) -> str:
        if step == self._first + 1:
            return (
                f"{_FUNCTION}: its data set has no example for step {step}; the data set is empty."
            )
        return (
            f"{_FUNCTION}: its data set ended before step {step}. A data set that ends is "
            "repeated, but this one gives nothing in another pass: perhaps it is of a generator "
            "that can be read only once."
        )

    def _check_shapes(self, step: int, name: str, given: np.ndarray) -> None:
        length = self._feature_length(name)
        wrong = np.flatnonzero((given[:, 0] != 1) | (given[:, 1] != length))
        if wrong.size:
            rank, *dims = given[wrong[0]].tolist()
            shape = [*map(str, dims[:rank]), *(["..."] if rank > len(dims) else [])]
            raise DataError(
                f"{_FUNCTION}: example {wrong[0]} in the batch of step {step} has {name!r} of the "
                f"shape [{', '.join(shape)}]; train.run.sequence_length wants [{length}]. Pad or "
                "cut it there."
            )

    def _check_ids(self, step: int, name: str, ids: np.ndarray) -> None:
        size = self._vocab_sizes.get(name)
        wrong = size and wrong_id_error(name, ids, size)
        if wrong:
            raise DataError(f"{_FUNCTION}: in the batch of step {step}, {wrong}")


# More hashes would not tell more.
_HASHED = 8


def _example_hashes(features: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a short hash, as text, of each of the first 8 examples of a batch.

    `features` are the batch's arrays ``[batch_size, length]``, by feature name.
    """
    hashes = []
    for example in zip(*(features[name][:_HASHED] for name in sorted(features))):
        content = hashlib.sha256()
        for x in example:
            content.update(np.ascontiguousarray(x, np.int32).tobytes())
        hashes.append(content.hexdigest()[:16])
    return hashes


def wrong_id_error(name: str, ids: np.ndarray, size: int) -> str:
    """Returns the text of an error if an id is not in the vocabulary; "" if all ids are right.

    `ids` ``[batch, length]`` are the ids of the feature `name`, and `size` is the number of ids in
    the feature's vocabulary.
    """
    # Mesh-TensorFlow gives a negative target no loss, and still reads its id.
    low = 1 - size if name == "targets" else 0
    if ids.min() >= low and ids.max() < size:
        return ""
    example, position = np.argwhere((ids < low) | (ids >= size))[0]
    also = " (or negative, for a target without loss)" if low else ""
    return (
        f"example {example} has the id {ids[example, position]} in {name!r}, at {position}; "
        f"train.run.vocabulary has the ids 0 to {size - 1}{also}. The model would read no token "
        "at this position."
    )


def _feature_specs(dataset: Any, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the `tf.TensorSpec` of each feature that the model reads, by name.

    `wanted` is called with a feature's name, and returns whether the model reads this feature.
    Raises ConfigError unless `dataset` is a tf.data.Dataset of dicts of integer tensors.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(f"{_FUNCTION} must return a tf.data.Dataset; got {dataset!r}")
    spec = dataset.element_spec
    if not isinstance(spec, dict):
        raise ConfigError(
            f"{_FUNCTION} must give examples as dicts, such as {{'targets': int32[length]}}; got "
            f"{spec!r}"
        )
    specs = {name: spec[name] for name in MODEL_FEATURES if name in spec and wanted(name)}
    for name, one in specs.items():
        if not isinstance(one, tf.TensorSpec):
            raise ConfigError(
                f"{_FUNCTION} gives {name!r} as {one!r}; it must be a dense tensor, padded to "
                "train.run.sequence_length"
            )
        if not one.dtype.is_integer:
            raise ConfigError(
                f"{_FUNCTION} gives {name!r} as {one.dtype.name}; it must be integers: int32 or "
                "int64 ids"
            )
    return specs


def _is_known(spec: Any) -> bool:
    return spec.shape.is_fully_defined()
