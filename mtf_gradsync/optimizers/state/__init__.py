"""The state of wrappers: names and owners, checkpoints of other runs, and new beginnings.

- `variables`: how a state variable is made, and the note that says how it is read.
- `slots`: which variable of the model a slot belongs to, and which optimizer writes it.
- `checkpoints`: finds variables that a checkpoint has in another form or not at all, and adapts it.
- `savers`: savers that read checkpoints of other runs, and errors of plain savers about these.
- `beginning`: how state begins if variables get values from another run.
"""
