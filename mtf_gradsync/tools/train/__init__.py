"""Trains transformers that gin describes, as a function and as a command.

A setting that cannot work raises `ConfigError` in all modules of this package. This tree shows
which module calls which, from the command to a training step:

    cli.main        the parser; cli.loading reads gin files by `gin_files`; each command is a file
      cli.train     calls `run.run`, on several processes by `distributed_run`
        run         checks, trains, evaluates, writes the report
          config, mesh_settings, model    bindings of train.run, checked: a `TrainingJob`
          data.batches                    one batch for each step
          runner                          a runtime's sessions, steps and checkpoints
            train_graph, learning_rate    the graph of a step
          resuming                        what differs from the run that goes on
          loop                            steps, checkpoints, when to stop; `metrics` shows them
          held_out, evaluation, sampling  what a checkpoint scores and writes
          page, plots, figures            the report; run_files has what else a run leaves
      cli.report    `comparison` of a step bare and wrapped, by `traffic`
      cli.timeline  `timed_run`
"""
