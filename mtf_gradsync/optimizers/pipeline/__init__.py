"""Builds one training step from a stack of wrappers.

- `stack`: a stack as a value: stages, what they take and give, and what completes it. `words`:
  the lines by which stages describe themselves.
- `weighted`: the stages that weights add to a stack.
- `order`: the orders of wrappers that make no sense.
- `builder`: makes the operations of a completed stack, in order.
- `forms`: the gradients between stages. `accumulators`, `weights`, `strategy_state`: sums from step
  to step, how much gradients stand for, and what strategies keep.
"""
