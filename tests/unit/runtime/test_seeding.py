"""Seeds: the same on every machine and in every process, different for everything that differs."""

import hashlib

from tailrl.runtime.seeding import derive_seed


def test_it_is_the_head_of_a_hash() -> None:
    digest = hashlib.sha256(b"rollout\x1f3\x1f0").hexdigest()
    assert derive_seed("rollout", 3, 0) == int(digest[:8], 16) // 2


def test_values_of_the_first_release() -> None:
    """Changing them would change every published number."""
    assert [derive_seed(), derive_seed("problems", 0, 0), derive_seed("rollout", 0, 0, 0, 0)] == [
        1910006305,
        237473321,
        1953161374,
    ]


def test_every_part_and_its_place_count() -> None:
    parts = [("a", 1, 2), ("a", 2, 1), ("a", 12), ("a1", 2), ("a", 1), ("a", 1, 2, ""), ("b", 1, 2), (1, "a", 2)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)


def test_seeds_fit_and_spread() -> None:
    seeds = [derive_seed("rollout", step, member) for step in range(50) for member in range(100)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    assert abs(sum(seeds) / len(seeds) / 2**31 - 0.5) < 0.02
