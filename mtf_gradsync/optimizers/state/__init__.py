"""The state of wrappers: names and owners, and new beginnings.

- `variables`: how a state variable is made, and the note that says how it is read.
- `slots`: which variable of the model a slot belongs to, and which optimizer writes it.
- `beginning`: how state begins if variables get values from another run.
"""
