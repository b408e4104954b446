"""One field and the values that it takes: what it changes."""
