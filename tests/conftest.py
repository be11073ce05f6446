"""How every test process starts: as a Mesh-TensorFlow program's entry point would."""

import atexit
import collections
import contextlib
import functools
import gc
import logging
import os
import shutil
import tempfile
import zlib

# Before anything starts jax: as many CPU devices as the largest mesh of the tests has cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=12")

# Tables and helps are as wide as where output is no terminal, whatever the tests are started from.
os.environ.pop("COLUMNS", None)

# Compiled programs are kept for these tests, not for the user. Xdist's workers have one folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MTF_GRADSYNC_CACHE_DIR"] = tempfile.mkdtemp(prefix="mtf_gradsync_tests_")
    atexit.register(shutil.rmtree, os.environ["MTF_GRADSYNC_CACHE_DIR"], ignore_errors=True)

import absl.flags
import gin
import pytest
from tensorflow.python.util import deprecation, tf_stack

from mtf_gradsync._common import reset_warnings
from mtf_gradsync._private.libraries import tf
from tests import documents, grappler

# To import the tests makes many objects and no garbage; see `pytest_collection_finish`.
gc.disable()
tf.logging.set_verbosity(tf.logging.ERROR)
tf.disable_v2_behavior()
tf.enable_resource_variables()
# Mesh-TF's SIMD mesh reads absl flags that only a parsed command line has.
absl.flags.FLAGS.mark_as_parsed()
grappler.turn_off()
logging.getLogger("tensorflow").addFilter(documents.is_not_of_garbage)
# To write the graph beside a checkpoint takes longer than the training, and nobody reads it.
tf.train.CheckpointSaverHook.__init__ = functools.partialmethod(
    tf.train.CheckpointSaverHook.__init__, save_graph_def=False
)
# Many functions look through their arguments at each call for some that are deprecated.
deprecation._PRINT_DEPRECATION_WARNINGS = False
# Each operation has the stack on which it was made, most of which is pytest's here, so that taking
# it is a tenth of building a graph.
tf_stack.extract_stack = functools.partial(
    lambda stack, stacklevel=1: stack, tf_stack.extract_stack()
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test that is marked ``mostly_slow`` one in ``every`` stays, or one; the others are slow.

    Which of them depends on the test's name: not all stay on the same kind of mesh. Where others
    would take seconds, it is the first whose name has what the mark wants to ``keep``.
    """
    marked = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("mostly_slow") and not item.get_closest_marker("slow"):
            marked[item.nodeid.partition("[")[0]].append(item)
    for name, cases in marked.items():
        mark = cases[0].get_closest_marker("mostly_slow")
        every = min(mark.kwargs.get("every", len(cases)), len(cases))
        first = zlib.crc32(name.encode()) % every
        if "keep" in mark.kwargs:
            kept = (n for n, case in enumerate(cases) if mark.kwargs["keep"] in case.name)
            first = next(kept, first)  # a run of chosen cases may lack it
        for number, item in enumerate(cases):
            if number % every != first % every:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Takes what was imported out of garbage collection: there is much of it, and it stays."""
    gc.collect()
    gc.freeze()
    # Building a graph makes many objects and no garbage.
    gc.set_threshold(1_000_000, 10, 10)
    gc.enable()


def pytest_sessionfinish():
    """Pytest has the last word, not TensorFlow about operations that nobody ran."""
    tf.logging.set_verbosity(tf.logging.FATAL)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Fixtures of a test that is marked ``grappler`` have it as well."""
    with grappler.as_users_have_it(item.get_closest_marker("grappler") is not None):
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef):
    """A fixture that several tests share builds in a graph of its own, as often as it is made.

    Xdist's workers take tests from each other and come back to a module, where it is made again.
    """
    with contextlib.nullcontext() if fixturedef.scope == "function" else tf.Graph().as_default():
        yield


@pytest.fixture(autouse=True)
def fresh_graph():
    """Each test builds in a graph of its own, sees warnings anew, and leaves gin as it was."""
    reset_warnings()
    bound = gin.config_str()
    with tf.Graph().as_default() as graph:
        yield graph
    if not bound and gin.config_str():  # or wrappers of the tests after it would be others
        gin.clear_config()
    # Or the tests after it would build other loops and conditionals.
    assert not tf.control_flow_v2_enabled()


@pytest.fixture(params=["placement", "simd"])
def mesh_kind(request):
    """Both kinds of mesh that a program is lowered on."""
    return request.param
