"""Builds one training step from a stack of wrappers.

Each module of this package has a part of the work:

- `stack` has the stack of wrappers as a value, and completes it: it collects the stages of each
  wrapper, adds stages that convert between forms of gradients, and makes blocks of stages that run
  in the same steps. `words` has the lines by which stages describe themselves.
- `order` finds wrappers in an order that makes no sense.
- `builder` makes the operations of a completed stack, in order.
- `forms` has sets of gradients as they pass from stage to stage, and the settings of reductions.
- `accumulators` has sums that are kept from step to step.
- `weights` has the weights of gradients: what the loss of a step stands for, such as its number of
  tokens.
- `strategy_state` has the state that reduction strategies keep.
"""
