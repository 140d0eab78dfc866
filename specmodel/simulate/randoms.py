"""Random numbers that depend on nothing but their key and their place: the same whatever runs beside them.

Each request has a 64-bit key, drawn by NumPy's Philox from the seed; its n-th round takes the n-th word of the
SplitMix64 sequence that starts there (Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators).
Policies that are compared see the same requests and, round for round, the same luck.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["chances", "fractions", "next_words", "request_random"]

Words = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_LOW_BITS = np.uint64(24)
_LOW = np.uint64((1 << 24) - 1)


def request_random(seed: int, purpose: int) -> np.random.Generator:
    """Return the generator of one property of the requests of one seed; a longer draw begins like a shorter one."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, purpose))))


def next_words(state: Words, out: Words, spare: Words) -> Words:
    """Advance every state by one and write its next word to `out`; `spare` is scratch of the same shape."""
    np.add(state, _GAMMA, out=state)
    np.right_shift(state, _30, out=out)
    np.bitwise_xor(out, state, out=out)
    np.multiply(out, _FIRST, out=out)
    np.right_shift(out, _27, out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, _SECOND, out=out)
    np.right_shift(out, _31, out=spare)
    np.bitwise_xor(out, spare, out=out)
    return out


def fractions(words: Words) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from the upper 40 bits: multiples of 2^-40."""
    return np.asarray((words >> _LOW_BITS).astype(np.float64) * 2.0**-40)


def chances(words: Words) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from the lower 24 bits, independent of `fractions` of the same words."""
    return np.asarray((words & _LOW).astype(np.float64) * 2.0**-24)
