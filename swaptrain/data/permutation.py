"""A stateless permutation of the items: the shuffled order without a list of it."""

from __future__ import annotations

__all__ = ["permuted"]

_MASK = 2**64 - 1
_ROUNDS = 8
# With halves of one bit the round functions have too few values: small datasets would meet the
# same few orders again and again. Three bits cost a handful of extra walks there and nothing else.
_SMALLEST_HALF_BITS = 3


def _mix(value: int) -> int:
    """Scramble 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(position: int, length: int, *, seed: int, epoch: int) -> int:
    """Return where `position` goes under the permutation of range(length) keyed (seed, epoch).

    A balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) permutes the next power of
    four; results outside the range walk on along their cycle until they fall inside it, which
    keeps the map a bijection of the range (cycle walking: Black and Rogaway, CT-RSA 2002). At most
    four walks are expected for 17 items and more; nothing is stored.
    """
    if not 0 <= position < length:
        raise IndexError(f"position {position} is outside of {length} items")
    half_bits = max(_SMALLEST_HALF_BITS, ((length - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    # A chain, not a sum of two mixed numbers: (seed 1, epoch 2) is not (seed 2, epoch 1).
    key = _mix(_mix(seed & _MASK) + epoch)
    value = position
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_number in range(_ROUNDS):
            scrambled = _mix(_mix(key + round_number) ^ right)
            left, right = right, left ^ (scrambled & half_mask)
        value = left << half_bits | right
        if value < length:
            return value
