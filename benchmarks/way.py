"""The way of one gradient through the package: files, moves from file to file, calls."""

from __future__ import annotations

import collections
import pathlib
import re
import sys
from types import FrameType
from typing import Any, Callable, NamedTuple

import mtf_gradsync as gs
from benchmarks import report
from mtf_gradsync._private.libraries import mtf, tf

_ROOT = str(pathlib.Path(gs.__file__).parent)
_PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "own_wrapper.md"
_MESH = {"mesh_shape": "batch:4", "layout": "batch:batch"}


def _one() -> Any:
    return gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))


def _four() -> Any:
    clipped = gs.ClipByGlobalNormOptimizer(gs.AdamWOptimizer(0.1), 1.0)
    return gs.GradientAccumulationOptimizer(gs.LossScaleOptimizer(clipped), 4, **_MESH)


# Each stack with the most files and moves that it should take.
STACKS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "cross shard(SGD)": (_one, 24, 300),
    "accumulation(loss scale(clip(AdamW)))": (_four, 32, 2000),
}
MOST_NAMES = 35


class Way(NamedTuple):
    """What runs of the package while the gradient of one variable is applied and lowered.

    Attributes:
      files: files with a function that is called.
      moves: calls of a function by a function of another file.
      calls: calls of functions, comprehensions among them.
      by_file: calls by file, under the package's folder.
    """

    files: int
    moves: int
    calls: int
    by_file: dict[str, int]


def way_of(make: Callable[[], Any]) -> Way:
    """Counts the way of a gradient through a stack, on a placement mesh of four."""
    # The second time, as the first imports and caches what is used for the first time.
    for _ in range(2):
        found = _counted(make)
    return found


def _counted(make: Callable[[], Any]) -> Way:
    calls: collections.Counter[str] = collections.Counter()
    moves = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(_ROOT):
            return
        calls[name] += 1
        before = frame.f_back
        moves += before is None or before.f_code.co_filename != name

    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh, batch, width = (
            mtf.Mesh(graph, "mesh"),
            mtf.Dimension("batch", 8),
            mtf.Dimension("in", 3),
        )
        shape, rules = mtf.convert_to_shape(_MESH["mesh_shape"]), _MESH["layout"]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            shape, mtf.convert_to_layout_rules(rules), [f"cpu:{i}" for i in range(shape.size)]
        )
        x = mtf.import_tf_tensor(mesh, tf.ones([8, 3]), mtf.Shape([batch, width]))
        start = tf.zeros_initializer()
        variable = mtf.get_variable(mesh, "w", mtf.Shape([width]), initializer=start)
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, variable], mtf.Shape([batch])) - 1.0))
        opt, grads = make(), mtf.gradients([loss], [variable])
        sys.setprofile(note)
        try:
            updates = opt.apply_grads(grads, [variable.operation])
            lowering = mtf.Lowering(graph, {mesh: impl})
            for update in updates:
                lowering.lowered_operation(update)
        finally:
            sys.setprofile(None)
    by_file = {str(pathlib.Path(k).relative_to(_ROOT)): n for k, n in calls.most_common()}
    return Way(len(calls), moves, sum(calls.values()), by_file)


def protocol() -> dict[str, list[str]]:
    """Returns the names that a wrapper of one's own may set, call or override, by class.

    They are those that the page "Write your own wrapper" promises, in its table of all names.
    """
    found: dict[str, list[str]] = {}
    of = ""
    for line in _PAGE.read_text(encoding="utf-8").partition("## All names")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and not cells[1].startswith("-") and cells[1] != "name":
            of = cells[0].strip("`") or of
            names = re.findall(r"`(\w+)[^`]*`", cells[1])
            found.setdefault(of, []).extend(names)
    return found


def measure(options: report.Options) -> report.Table:
    """Counts the ways of both stacks, and the names of the protocol."""
    rows: list[report.Row] = []
    targets = []
    for name, (make, most_files, most_moves) in STACKS.items():
        way = way_of(make)
        rows.append({"stack": name, "files": way.files, "moves": way.moves, "calls": way.calls})
        if not options.quick:
            targets += [
                report.Target(f"files of {name}", way.files, most_files, ""),
                report.Target(f"moves of {name}", way.moves, most_moves, ""),
            ]
    names = protocol()
    count = sum(map(len, names.values()))
    if not options.quick:
        targets.append(report.Target("names of the protocol", count, MOST_NAMES, ""))
    listed = [f"{kind} ({len(some)}): {', '.join(some)}." for kind, some in names.items()]
    return report.Table(
        name="way",
        title="The way of one gradient: calls while it is applied and lowered, placement mesh",
        rows=rows,
        notes=[
            "moves: calls of a function by one of another file.",
            f"A wrapper of one's own may set, call or override {count} names:",
            *listed,
        ],
        targets=targets,
    )


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.way"))
