"""The exam of `tailrl diagnose`."""
