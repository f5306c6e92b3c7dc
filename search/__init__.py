"""Many trials of one config: which values they have, how they run, and how they compare."""
