"""The Hydra edge: one small module per command, and the one place that composes and checks settings.

`main` reads the command line, `edge` runs one command, `composing`, `reading` and `catalogue` turn arguments and YAML
into settings, `runs` owns the run folder, `terminal` owns stdout, stderr and the log. Nothing below this package
knows Hydra, OmegaConf, the command line or the terminal.
"""
