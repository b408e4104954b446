"""The pages of findings: templates, the numbers that they look up, and their figures."""
