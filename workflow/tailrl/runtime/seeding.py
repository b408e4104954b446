"""Seeds that do not depend on the process: Python's own `hash` differs from run to run."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**31) that depends on every part and the parts' order alone."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
