"""What a type checker tells who uses the package: mypy, with the settings of the project."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync.reduce import AllReduce, CompressedAllReduce, HierarchicalAllReduce

class Plain:
    pass

class Mine:
    def apply_grads(self, grads: list, variables: list) -> list:
        return []

class Takes:
    def apply_grads(self, grads: list, variables: list, grad_scale: float) -> list:
        return []

mine = Mine()
gs.CrossShardOptimizer(Takes()).apply_grads([], [], grad_scale=2.0)
gs.CrossShardOptimizer(mine)
gs.CrossShardOptimizer(mine, reduction="weighted_mean")
gs.CrossShardOptimizer(mine, reduction="meen")  # wrong
gs.CrossShardOptimizer(mine, reduction=tf.losses.Reduction.SUM)
gs.CrossShardOptimizer(tf.train.AdamOptimizer(0.1))
gs.CrossShardOptimizer(mtf.optimize.AdafactorOptimizer, learning_rate=0.1)
gs.CrossShardOptimizer(Mine, learning_rate=0.1)
gs.CrossShardOptimizer(lambda learning_rate: mine, learning_rate=0.1)
gs.CrossShardOptimizer(Plain())  # wrong
gs.CrossShardOptimizer(Plain, learning_rate=0.1)  # wrong
gs.CrossShardOptimizer(mine, mesh_shape="batch:4", layout="batch:batch")
gs.CrossShardOptimizer(mine, mesh_shape=mtf.Shape([]), layout=mtf.LayoutRules([]))
gs.CrossShardOptimizer(mine, mesh_shape=[("batch", 4)], layout=[("batch", "batch")])
gs.CrossShardOptimizer(mine, mesh_shape=4, layout="batch:batch")  # wrong
gs.CrossShardOptimizer(mine, mesh_shape="batch:4", layout=4)  # wrong
gs.CrossShardOptimizer(mine, axes=gs.ReplicaAxes("batch:4", "batch:batch"))
gs.CrossShardOptimizer(mine, axes="batch:4")  # wrong
inner = gs.ClipByGlobalNormOptimizer(gs.MeshOptimizer(tf.train.AdamOptimizer(0.1)), 1.0)
gs.ClipByGlobalNormOptimizer(Plain(), 1.0)  # wrong
gs.GradientAccumulationOptimizer(inner, 4, accumulate="local")
gs.GradientAccumulationOptimizer(inner, 4, accumulate="locl")  # wrong
gs.GradientAccumulationOptimizer(Plain(), 4)  # wrong
gs.LossScaleOptimizer(inner, loss_scale=128.0)
gs.LossScaleOptimizer(inner, loss_scale="dynamik")  # wrong
gs.ShardedUpdateOptimizer(inner, axes=4)  # wrong
gs.SyncReplicasOptimizer(inner, 4, mesh_shape=4)  # wrong
gs.MeshOptimizer(inner.opt)
gs.MeshOptimizer(Plain())  # wrong
gs.CrossShardOptimizer(mine, reducer=AllReduce("ring"))
gs.CrossShardOptimizer(mine, reducer="ring")  # wrong
AllReduce("rnig")  # wrong
CompressedAllReduce(wire_dtype="float16")
CompressedAllReduce(wire_dtype=tf.bfloat16)
CompressedAllReduce(wire_dtype="float8")  # wrong
HierarchicalAllReduce([("ring", 1, 1024), ("add_n/add_n", 2, -1)])
HierarchicalAllReduce("add_n/adn")  # wrong
gs.LowRankAllReduce(rank="2")  # wrong
gs.reduce.BestAllReduce().all_reduce
gs.reduce.NothingAllReduce  # wrong
gs.xla.session
gs.xla.sesion  # wrong
gs.simd.nothing  # wrong
gs.islands.Folder("gs://islands")
gs.islands.nothing  # wrong
gs.plan(1)  # wrong
gs.nothing  # wrong
gs.verify(1)  # wrong
estimator.Estimator(print, runtime="cpu_replicas")
estimator.Estimator(print, runtime="cpu")  # wrong
"""


@pytest.mark.slow
def test_wrong_words_and_objects_are_errors_for_mypy(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    settings = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path / "cache"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "--no-pretty", program],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    parts = [line.split(":", 3) for line in result.stdout.splitlines() if ": error:" in line]
    assert {path for path, *_ in parts} == {str(program)}, result.stdout + result.stderr
    wrong = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted({int(line) for _, line, *_ in parts}) == wrong, result.stdout
