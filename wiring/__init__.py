"""From config.json to the parts of a run: config (read, override), parts (find by name), values (check arguments), build, schema."""
