"""The tests themselves: what they share is in helper modules."""

import ast
import pathlib

TESTS = pathlib.Path(__file__).parent


def imported(path):
    """Names of modules that a file imports, and of what it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_imported_from_test_modules():
    """What is imported is tested with whatever imports it, and is found where helpers are."""
    modules = {
        f"tests.{'.'.join(path.relative_to(TESTS).with_suffix('').parts)}"
        for path in TESTS.rglob("test_*.py")
    }
    found = {str(path): modules.intersection(imported(path)) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


PACKAGE = TESTS.parent / "mtf_gradsync"
# Of modules without tests of their name, where the tests are that would fail.
TESTED_BY = {
    # What users call is tested, and with it the modules that it is made of.
    "gradients/flow/test_foreseen.py": ["gradients/operations"],
    "gradients/test_clipping.py": ["gradients/measures"],
    "optimizers/loss_scale/test_loss_scale.py": ["gradients/losses"],
    "optimizers/outer": ["optimizers/outer_steps", "optimizers/outer_values"],
    "optimizers/pipeline/test_gradient_strategy.py": [
        "gradients/reduce_gradients",
        "optimizers/pipeline/strategy_state",
    ],
    "optimizers/pipeline/test_own_wrapper.py": [
        "optimizers/pipeline/builder",
        "optimizers/pipeline/forms",
    ],
    "optimizers/accumulation": ["optimizers/pipeline/accumulators"],
    "optimizers/accumulation/test_skip_spikes.py": ["optimizers/skip_functions"],
    "optimizers/sharded_updates": ["optimizers/sharded_variables"],
    "optimizers/state/test_schedules.py": ["optimizers/schedules"],
    "optimizers/state/test_shared_slots.py": ["optimizers/slots"],
    "optimizers/sync_replicas": ["optimizers/replicas"],
    "optimizers/test_describe.py": ["optimizers/description", "optimizers/pipeline/words"],
    "optimizers/test_reported.py": ["optimizers/step_reports"],
    "optimizers/test_weights.py": ["optimizers/pipeline/weights"],
    "optimizers/test_wrapper.py": ["optimizers/interface"],
    "gradients/test_recoverable.py": ["gradients/layout"],
    # Of sessions and runs of all runtimes, by what they leave behind.
    "runtimes/starting": ["runtimes/saving"],
    "runtimes/processes/test_members.py": ["runtimes/processes/proxy"],
    "runtimes/simd/test_collectives.py": ["runtimes/simd/communication"],
    "runtimes/simd/test_compiled_only.py": ["runtimes/xla/installed"],
    "runtimes/simd/test_emulator.py": ["runtimes/simd/graph_writing"],
    "runtimes/simd/test_side_effects.py": [
        "runtimes/simd/functionalize",
        "runtimes/simd/graph_facts",
    ],
    "runtimes/test_memory.py": ["runtimes/sessions", "runtimes/xla/device_values"],
    "runtimes/xla/distributed": ["runtimes/xla/gathering"],
    "runtimes/xla/test_programs.py": ["runtimes/xla/bridge"],
    "runtimes/xla/test_xla_session.py": [
        "runtimes/xla/core_devices",
        "runtimes/xla/host_graph",
        "runtimes/xla/try_jax",
    ],
    # A folder that runs without this package: it is tested as a folder.
    "runtimes/xla/export": [
        "runtimes/xla/manifest",
        "runtimes/xla/run",
        "runtimes/xla/runner/command",
        "runtimes/xla/runner/files",
        "runtimes/xla/runner/jax_devices",
        "runtimes/xla/runner/loaded_program",
        "runtimes/xla/runner/step",
    ],
    "runtimes/xla/topology/test_chips.py": ["runtimes/xla/topology/slices"],
    "runtimes/xla/topology/test_compiler_process.py": ["runtimes/xla/topology/compiler_script"],
    # What happens to a folder of islands is no one module's doing.
    "tools/islands/test_faults.py": [
        "tools/islands/exchange",
        "tools/islands/leases",
        "tools/islands/objects",
        "tools/islands/tensor_files",
    ],
    "tools/islands/test_island.py": ["tools/islands/journal"],
    "tools/islands/test_merger.py": ["tools/islands/received", "tools/islands/versions"],
    "tools/planning/test_best.py": ["tools/planning/costs", "tools/planning/stacks"],
    "tools/planning/test_machines.py": ["tools/planning/plan"],
    "tools/timelines/test_known_pattern.py": ["tools/timelines/tensorflow_steps"],
    "tools/timelines/test_table.py": ["tools/timelines/recording"],
    "tools/islands/test_command.py": ["tools/train/cli/islands"],
    "tools/train/cli/test_best_command.py": [
        "tools/train/best_division",
        "tools/train/config_stack",
    ],
    "tools/train/cli/test_main.py": ["tools/train/cli/train"],
    "tools/train/cli/test_report_command.py": ["tools/train/comparison", "tools/train/traffic"],
    "tools/train/cli/test_timeline_command.py": ["tools/train/timed_run"],
    "tools/train/config/test_gin_files.py": ["tools/train/gin_files"],
    "tools/train/config/test_settings.py": [
        "tools/train/learning_rate",
        "tools/train/mesh_settings",
        "tools/train/model",
    ],
    "tools/train/config/test_verified_configs.py": ["tools/train/verifying"],
    "tools/train/test_evaluation.py": ["tools/train/sampling"],
    "tools/train/test_metrics.py": ["runtimes/step_means"],
    "tools/train/test_page.py": ["tools/train/run_files"],
    "tools/train/test_plots.py": ["tools/train/figures"],
    "tools/train/test_run.py": ["tools/train/runner", "tools/train/train_graph"],
    # `verify` has one function for users.
    "tools/verification/test_verdicts.py": [
        "tools/verification/causes",
        "tools/verification/comparing",
        "tools/verification/divisions",
        "tools/verification/engine",
        "tools/verification/program_patches",
        "tools/verification/recorded_program",
        "tools/verification/reference",
        "tools/verification/verifier",
    ],
    "tools/verification/test_verify.py": ["tools/train/cli/verify"],
    # Private names, and helpers of all rooms.
    "private/test_jax.py": ["tools/_private/profiles"],
    "private/test_libraries.py": ["_private/estimator_stand_ins"],
    "test_imports.py": ["_private/lazy", "extension"],
    "properties/test_arguments.py": ["_common"],
}


def named_for(module):
    """Whether there are tests, a file or a folder, that a module's name leads to."""
    *rooms, name = (part.lstrip("_") for part in module.split("/"))
    folder = TESTS / "private" if "_private" in module else TESTS.joinpath(*rooms)
    folders = (folder / name, folder / f"{name}s")
    return any(folder.glob(f"test_{name}*.py")) or any(path.is_dir() for path in folders)


def test_tests_of_a_module_are_found_by_its_name_or_in_the_table():
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    listed = [module for some in TESTED_BY.values() for module in some]
    assert {module for module in modules if not named_for(module)} == set(listed)
    assert len(set(listed)) == len(listed)
    assert [where for where in TESTED_BY if not (TESTS / where).exists()] == []
