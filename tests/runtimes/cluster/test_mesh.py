"""A placement mesh over two processes does what one process does."""

import json

import numpy as np
import pytest

from benchmarks.cluster import reserved_ports
from mtf_gradsync import reduce, session_config, simd
from mtf_gradsync._private.libraries import mtf
from tests import models, reference
from tests.optimizers.outer import outer_reference
from tests.reduce import on_mesh
from tests.runtimes.cluster import mesh_program as program
from tests.runtimes.cluster.processes import Processes
from tests.tools.timelines import traces

pytestmark = pytest.mark.cluster
EPS = np.finfo(np.float32).eps
# A few ulp of values around 1 a step, as for every trajectory.
TOLERANCE = program.STEPS * 16 * EPS
OUTER = "outer fused"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the program writes its files."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def values(folder):
    """What the program computes on a cluster: values by case and name."""
    path = folder / "values.npz"
    # Reserved: a port that is merely free may be another test's when the server comes to it.
    with reserved_ports(program.TASKS) as ports, Processes() as processes:
        spec = json.dumps({"worker": [f"127.0.0.1:{port}" for port in ports]})
        tasks = [
            processes.fork("-m", program.__name__, spec, "worker", task, path)
            for task in range(program.TASKS)
        ]
        processes.wait(tasks[0])
    found = {}
    with np.load(path) as file:
        for key in file.files:
            case, _, name = key.partition("|")
            found.setdefault(case, {})[name] = file[key]
    return found


@pytest.fixture(scope="module")
def one_process():
    """Variables after the same training on eight devices of this process."""
    devices = [f"/device:CPU:{i}" for i in range(len(program.DEVICES))]
    config = session_config(num_cpu_devices=len(devices))
    return {
        case.split()[0]: program.train(case, program.placement(case, devices), "", config)
        for case in ("train fused", "accumulate collective")
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(program.optimizers()) - {OUTER}))
def test_trains_as_one_process_and_as_numpy(values, one_process, case):
    update = reference.Momentum()
    if case.startswith("accumulate"):
        update = reference.Accumulation(update, program.K)
    for name, value in reference.train(update, models.mlp_batches(program.STEPS)).items():
        np.testing.assert_allclose(
            values[case][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )
    alone = one_process["accumulate" if case.startswith("accumulate") else "train"]
    assert sorted(alone) == sorted(values[case])
    for name, value in alone.items():
        np.testing.assert_allclose(
            values[case][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["on a cluster", "in shared memory"])
def test_islands_are_processes_or_share_their_memory(values, where):
    if where == "on a cluster":
        found = values[OUTER]
    else:
        devices = [f"/device:CPU:{i}" for i in range(len(program.DEVICES))]
        mesh_impl, config = (
            program.placement("mesh fused", devices),
            session_config(num_cpu_devices=len(devices)),
        )
        found = program.train(OUTER, mesh_impl, "", config)
    feeds = models.mlp_batches(program.STEPS)
    all_at_once = outer_reference.ALL
    expected = outer_reference.train("momentum", feeds, 2, program.K, 0.7, 0.5, True, all_at_once)
    for name, value in expected.outer.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
        islands = np.stack([island[name] for island in expected.islands])
        np.testing.assert_allclose(found[f"{name}/island"], islands, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", program.STRATEGIES)
def test_sums_equal_float64(values, strategy):
    out = iter([values[f"sum {strategy}"][str(i)] for i in range(len(values[f"sum {strategy}"]))])
    for axes in on_mesh.subsets(program.MESH):
        groups = mtf.processor_groups(mtf.convert_to_shape(program.MESH), list(axes))
        for x in program.arrays():
            y = next(out)
            # n summands, at most n - 1 roundings of sums no larger than that of the sizes.
            limit = len(groups[0]) * EPS / 2 * on_mesh.expected(program.MESH, np.abs(x), groups)
            assert (np.abs(y - on_mesh.expected(program.MESH, x, groups)) <= limit).all()
            for group in groups:
                assert len({y[p].tobytes() for p in group}) == 1


def test_strategies_that_exist_are_here():
    """A new strategy is to be tried across processes too."""
    names = [getattr(reduce, name) for name in dir(reduce)]
    classes = {x for x in names if isinstance(x, type) and issubclass(x, reduce.Strategy)}
    tried = {type(make()) for make in program.STRATEGIES.values()}
    # Another strategy's messages, made smaller; tests/reduce/test_compressed.py has it.
    smaller = {reduce.CompressedAllReduce}
    # Of gradients alone; test_two_processes_compressed.py has them.
    smaller |= {reduce.QuantizedAllReduce, reduce.LowRankAllReduce}
    assert classes - tried == {reduce.Strategy, reduce.GradientStrategy} | smaller


def test_counting_needs_a_step():
    with pytest.raises(ValueError, match="count_process_transfers needs"):
        simd.count_process_transfers([])


@pytest.mark.slow
def test_a_timeline_shows_the_devices_of_all_tasks(values, folder):
    """A session of a server gets what every task of the cluster has run."""
    trace = traces.read(folder / program.TRACE)
    traces.check(trace)
    names = traces.process_names(trace)
    devices = {f"worker {t} CPU:{d}" for t in range(program.TASKS) for d in range(program.EACH)}
    assert set(names.values()) == {"steps", *devices}
    found = traces.tracks(trace)
    for pid, name in names.items():
        rows = [row for (one, _), rows in found.items() if one == pid for row in rows]
        if name == "steps":
            assert len(found[pid, 1]) == program.STEPS
        else:
            assert {row["cat"] for row in rows} == {"compute", "collective"}
            # In each of the steps.
            (steps,) = [found[one, 1] for one, of in names.items() if of == "steps"]
            for step in steps:
                end = step["ts"] + step["dur"]
                assert any(step["ts"] <= r["ts"] and r["ts"] + r["dur"] <= end for r in rows)
