"""A study as typed settings: one module for each block, and the only reader of the YAML."""
