"""SGD with sums of whole numbers, by hand."""

import numpy as np

from tests import reference
from tests.reduce import compressed

# Rows of replicas of "2x2", and slices of "hidden".
SHARDS = {"4": (4, 1), "2x2": (2, 2), "one": (1, 1)}


STEPS = 50


FEEDS = compressed.batches(STEPS)


SIZE = 32


class Reference:
    """SGD with sums of whole numbers in float32, by hand."""

    def __init__(self, mesh, bits=8, feedback=True):
        self.bits, self.feedback = bits, feedback
        self.shards, self.slices = SHARDS[mesh]
        grads = compressed.gradients(FEEDS[0], self.shards)
        self.errors = {k: 0 * grads[k].astype("f") for k in ("w", "b")}
        self.values = {k: 0 * g[0].astype("f") for k, g in grads.items()}

    def move(self, mesh):
        """Goes on on another mesh with the sum of what was not sent."""
        self.shards, self.slices = SHARDS[mesh]
        for name, old in self.errors.items():
            self.errors[name] = np.zeros([self.shards, *old.shape[1:]], "f")
            for shard, error in enumerate(old):
                self.errors[name][shard * self.shards // len(old)] += error

    def pays(self, name):
        """Whether blocks make a core's slice half as large."""
        size = self.values[name].size // self.slices
        return 2 * -(-size // SIZE) * (SIZE * self.bits // 8 + 2) <= 4 * size

    def step(self, feed):
        self.apply(compressed.gradients(feed, self.shards))

    def apply(self, grads, divisor=1):
        """One update with gradients `[shards, ...]`, whose sums are divided."""
        sums = {"gain": grads["gain"].sum().astype("f")}
        wanted = {k: grads[k].astype("f") + error for k, error in self.errors.items()}
        sent = [k for k in wanted if self.shards > 1 and self.pays(k)]
        for name in wanted.keys() - sent:
            sums[name] = wanted[name].sum(0)
            self.errors[name] = 0 * self.errors[name]
        if sent:
            slices = zip(*(compressed.parts_of(wanted[k], self.slices) for k in sent))
            made = [compressed.quantized_sums(list(one), self.bits, SIZE) for one in slices]
            for name, of_slices in zip(sent, zip(*made)):
                totals, left = zip(*of_slices)
                sums[name] = np.concatenate(totals, -1)
                if self.feedback:
                    self.errors[name] = np.concatenate(left, -1)
        for name, value in self.values.items():
            self.values[name] = value - np.float32(compressed.RATE / divisor) * sums[name]

    def check(self, found):
        reference.assert_equal(found, self.values)
        for name, expected in self.errors.items():
            error = found[f"{name}/quantization_error"]
            np.testing.assert_array_equal(error, expected.reshape(error.shape), err_msg=name)
