"""From config.json to the parts of a run: read and override the config, find parts, build them."""
