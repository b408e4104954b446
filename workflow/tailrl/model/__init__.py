"""The policy: its model, its tokenizer, and its forward on packed rows."""
