"""Parts of the documentation site that are made from the code; docs/code/hooks.py gives them to MkDocs."""
