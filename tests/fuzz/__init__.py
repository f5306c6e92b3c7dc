"""Mutants of what a user, or a stranger, can write: configs, checkpoints, sweeps, data files. Every
command must end with an exit code and a message that names the place.

`python -m tests.fuzz KIND BASE SEED` shows and runs a single one.
"""
