"""Finds the op that produced the first nan of a step."""
