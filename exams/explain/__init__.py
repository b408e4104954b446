"""The exam of `tailrl explain`."""
