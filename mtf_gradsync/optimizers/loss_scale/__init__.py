"""Loss scaling, so that gradients of narrow dtypes neither vanish nor overflow."""
