"""A study as typed settings: one module a block, and the only reader of the YAML."""
