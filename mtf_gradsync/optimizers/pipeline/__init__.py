"""Builds one training step from a stack of wrappers.

- `stack`: a stack as a value: its stages, the forms of gradients that they take and give, and how
  stages that convert between forms are inserted. `words`: the lines by which stages describe
  themselves.
- `weighted`: the stages that weights add to a stack.
- `order`: the orders of wrappers that make no sense.
- `builder`: makes the operations of a completed stack, in order.
- `forms`: sets of gradients as they pass from stage to stage. `accumulators`: sums that are kept
  from step to step. `weights`: how much gradients stand for. `strategy_state`: the state that
  reduction strategies keep.
"""
