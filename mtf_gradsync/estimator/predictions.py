"""Selects predictions by key, and splits batches of them into examples."""

from __future__ import annotations

from typing import Any, Iterator, Sequence


def selected(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    """Returns a dict of the predictions with the given keys; for None all predictions as they are.

    Raises ValueError for a key that the model, or a single tensor, does not have.
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
    """Yields the rows of a batch: arrays of one array, dicts of a dict of arrays.

    Raises ValueError if arrays in a dict differ in length.
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
