"""From config.json to the parts of a run: read and override it, find parts by name, check their arguments, build them."""
