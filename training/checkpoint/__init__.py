"""Checkpoints: what is in a file, when it is written, which are kept, and how a run goes on from one. Nothing is unpickled."""
