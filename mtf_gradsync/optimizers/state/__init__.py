"""The state of wrappers: names and owners, checkpoints of other runs, and new beginnings.

- `variables`: how a state variable is made, and the note that says how it is read.
- `slots`: whose slot a variable is.
- `checkpoints`: what a checkpoint has for a graph, in another form or not at all.
- `savers`: savers that read checkpoints of other runs, and what plain ones refuse.
- `beginning`: how state begins where values come from another run.
"""
