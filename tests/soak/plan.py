"""Which faults hit what: as many for each runtime, and in it for each config and kind."""

from __future__ import annotations

import collections
import random
from typing import NamedTuple, Sequence

from tests.soak import settings
from tests.soak.faults import OF_ANOTHER_CONFIG, Fault, faults_for


class Group(NamedTuple):
    """The faults that hit the runs of one runtime and one config, one run after the other.

    Attributes:
      runtime: what runs the steps.
      config: the config's name.
      faults: one for each time that a run is to be hit, in random order.
      seed: of what else is chosen.
    """

    runtime: settings.Runtime
    config: str
    faults: list[Fault]
    seed: str

    def configs(self) -> list[str]:
        """The configs whose graphs and runs without faults it needs."""
        confused = any(fault.name in OF_ANOTHER_CONFIG for fault in self.faults)
        return [self.config, *([settings.other_config(self.config)] if confused else [])]


def plan(seed: int, faults: int, runtimes: Sequence[str], configs: Sequence[str]) -> list[Group]:
    """Spreads faults evenly.

    Args:
      seed: of everything that is chosen.
      faults: how many.
      runtimes: names; each gets as many faults as the others, but for one where that cannot be.
      configs: names.

    Returns:
      Groups that are not empty, those of the slow runtimes first.
    """
    rng = random.Random(seed)
    of_kind: collections.Counter[str] = collections.Counter()
    groups = []
    # Those that few faults can hit choose last: a small number of faults is of many kinds.
    for place, name in enumerate(runtimes):
        share = faults // len(runtimes) + (place < faults % len(runtimes))
        runtime = settings.RUNTIMES[name]
        chosen = _spread(rng, runtime, configs, share, of_kind)
        for config in configs:
            own = [fault for given, fault in chosen if given == config]
            rng.shuffle(own)
            if own:
                groups.append(Group(runtime, config, own, f"{seed}/{name}/{config}"))
    return sorted(groups, key=lambda group: -group.runtime.num_processes)


def _spread(
    rng: random.Random,
    runtime: settings.Runtime,
    configs: Sequence[str],
    share: int,
    of_kind: collections.Counter[str],
) -> list[tuple[str, Fault]]:
    """A runtime's faults with the configs that they hit; counts kinds over all runtimes."""
    cells = [(config, fault) for config in configs for fault in faults_for(runtime, config)]
    rng.shuffle(cells)
    cell_count: collections.Counter[tuple[str, str]] = collections.Counter()
    config_count: collections.Counter[str] = collections.Counter()
    kind_count: collections.Counter[str] = collections.Counter()
    chosen = []
    for _ in range(share):
        config, fault = min(
            cells,
            key=lambda cell: (
                cell_count[cell[0], cell[1].name],
                kind_count[cell[1].name],
                of_kind[cell[1].name],
                config_count[cell[0]],
            ),
        )
        chosen.append((config, fault))
        cell_count[config, fault.name] += 1
        kind_count[fault.name] += 1
        of_kind[fault.name] += 1
        config_count[config] += 1
    return chosen
