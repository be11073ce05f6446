"""Builds one training step from a stack of wrappers.

- `stack`: a stack as a value, and the passes that complete it: the stages of each wrapper, stages
  that convert between forms of gradients, and blocks of stages that run in the same steps. `words`:
  the lines by which stages describe themselves.
- `order`: the orders of wrappers that make no sense.
- `builder`: makes the operations of a completed stack, in order.
- `forms`: sets of gradients as they pass from stage to stage, and the settings of reductions.
- `accumulators`: sums that are kept from step to step. `weights`: how much gradients stand for.
  `strategy_state`: the state that reduction strategies keep.
"""
