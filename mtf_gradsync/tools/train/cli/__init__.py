"""The command ``mtf-gradsync`` and its subcommands."""
