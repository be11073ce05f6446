"""Names of wrappers' attributes from before they had traits."""

from __future__ import annotations

import warnings

from mtf_gradsync.optimizers.pipeline import Traits


class DeprecatedNames:
    """Mixed into wrappers: old names, each with a warning that says the new one."""

    traits: Traits

    @property
    def skips_updates(self) -> bool:
        """Whether some steps bring no update."""
        return self._trait("skips_updates", "schedules_updates")

    @property
    def leaves_out_not_finite(self) -> bool:
        """Whether gradients that are not finite are skipped."""
        watches = self.traits.watches_not_finite
        return self._trait("leaves_out_not_finite", "skips_not_finite") or watches

    @property
    def tells_replicas_apart(self) -> bool:
        """Whether the gradients of some shards are applied without those of others."""
        return self._trait("tells_replicas_apart", "skips_shards")

    def _trait(self, old: str, new: str) -> bool:
        warnings.warn(
            f"{type(self).__name__}.{old} is deprecated: use {type(self).__name__}.traits.{new}.",
            DeprecationWarning,
            stacklevel=3,
        )
        return bool(getattr(self.traits, new))
