"""The data of the examples: scikit-learn's handwritten digits, some of them held out."""

import numpy as np
from sklearn.datasets import load_digits


def load(held_out):
    """Returns (images, digits) to train on and (images, digits) held out, in a fixed order.

    Images are float64 `[number, 64]` from 0 to 1, digits whole numbers `[number]`.
    """
    images, digits = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images, digits = images[order] / 16.0, digits[order]
    return (images[held_out:], digits[held_out:]), (images[:held_out], digits[:held_out])
