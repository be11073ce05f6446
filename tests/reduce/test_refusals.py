"""What the constructor of each strategy refuses."""

import inspect
import re

import numpy as np
import pytest

from mtf_gradsync import reduce

INSTEAD = {
    "nccl": "CollectiveAllReduce",
    "hierarchical_copy": "HierarchicalAllReduce",
    "pscpu": "add_n",
    "tree": "ring",
    3: "add_n",
}
NOT_A_STRATEGY = ({"reducer": reduce.FusedAllReduce}, TypeError, "reducer")


def wrong(argument, *values, error=ValueError):
    return [({argument: value}, error, argument) for value in values]


# Of each, arguments, the error, and what it says.
REFUSED = {
    "AllReduce": [
        *(
            ({"algorithm": name}, ValueError, rf"(?s)^(?=.*{would_do}).*algorithm.*got {name!r}")
            for name, would_do in INSTEAD.items()
        ),
        *wrong("num_packs", -1, 1.5, "2", None, True),
        *wrong("agg_small_grads_max_bytes", -1, 1.5, "2", None, True),
        *wrong("agg_small_grads_max_group", -1, 1.5, "2", None, True),
    ],
    "CollectiveAllReduce": [
        *wrong("merge_scope", 0, 1.5),
        *wrong("timeout_seconds", -1, "1"),
    ],
    "CompressedAllReduce": [
        NOT_A_STRATEGY,
        *wrong("wire_dtype", "float32", "int8", "narrow", 999, object()),
        # The last four are 0 or infinite in float32, or may become 0: sums would be NaN.
        *wrong("prescale", 0, -1.0, np.inf, np.nan, "2", True, 1e-50, 1e-40, 1e39, 10**400),
    ],
    "FusedAllReduce": [
        *wrong("bucket_bytes", -1, 1.5, "1", True),
        *wrong("packed_bytes", -1, 1.5, "1", True),
    ],
    "HierarchicalAllReduce": [
        ({"spec": []}, ValueError, "an entry"),
        ({"spec": None}, ValueError, "tuple"),
        ({"spec": ()}, ValueError, "one to three"),
        ({"spec": ("add_n", 1, -1, 0)}, ValueError, "one to three"),
        ({"spec": "add_n/add_n/add_n"}, ValueError, "two levels"),
        ({"spec": "add_n/"}, ValueError, "algorithm of spec"),
        ({"spec": "nccl/xring"}, ValueError, "CollectiveAllReduce"),
        ({"spec": "pscpu/pscpu"}, ValueError, "'add_n'"),
        ({"spec": (3,)}, ValueError, "algorithm of spec"),
        ({"spec": ("add_n", 0)}, ValueError, "shards"),
        ({"spec": ("add_n", 1.5)}, ValueError, "shards"),
        ({"spec": ("add_n", 1, 100)}, ValueError, "end with -1"),
        ({"spec": ("add_n", 1, -2)}, ValueError, "limit"),
        ({"spec": [("add_n", 1, 100), ("add_n", 1, 50), ("add_n", 1, -1)]}, ValueError, "rise"),
        ({"spec": [("add_n", 1, -1), ("add_n", 1, -1)]}, ValueError, "rise"),
        ({"spec": [("add_n", 1, 100), ("add_n", 1, 100), "ring"]}, ValueError, "rise"),
        ({"spec": ["add_n", 2, -1]}, ValueError, "one to three"),
        *wrong("outer_axes", 1, [True], [None], 1.5),
    ],
    "LowRankAllReduce": [
        NOT_A_STRATEGY,
        *wrong("rank", 0, 1.5),
        *wrong("start_step", -1),
        *wrong("min_compression_rate", 0, float("nan")),
        *wrong("warm_start", None, error=TypeError),
        *wrong("error_feedback", 1, error=TypeError),
    ],
    "QuantizedAllReduce": [
        NOT_A_STRATEGY,
        *wrong("bits", 7, True),
        *wrong("block_size", 0, 2.0),
        ({"bits": 4, "block_size": 33}, ValueError, "block_size"),
        *wrong("error_feedback", 1, error=TypeError),
    ],
    "ReductionToOneDevice": [
        *wrong("reduce_to_device", "first", "", 0, ["cpu:0"]),
        *wrong("accumulation_fn", "add_n", error=TypeError),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "arguments", "error", "words"), CASES)
def test_it_is_refused(name, arguments, error, words):
    with pytest.raises(error, match=words):
        getattr(reduce, name)(**arguments)


def test_the_docstrings_name_just_these_errors():
    """A new strategy has to have both, if it has arguments."""
    for name in reduce.__all__:
        made = getattr(reduce, name)
        is_strategy = isinstance(made, type) and issubclass(made, reduce.Strategy)
        if is_strategy and not inspect.isabstract(made):
            text = inspect.getdoc(made.__init__).partition("Raises:\n")[2]
            documented = set(re.findall(r"^\s*(\w+Error):", text, re.MULTILINE))
            assert documented == {error.__name__ for n, _, error, _ in CASES if n == name}, name
