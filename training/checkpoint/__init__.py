"""Checkpoints: file formats, when a run is saved, which files are kept, and how they are loaded."""
