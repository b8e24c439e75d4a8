"""Is a uniform number below exp(−a/b)? Decided exactly, in whole numbers.

The uniform number is a stream of random bits of which only as many are drawn as the decision needs;
exp(−a/b) is enclosed between two fractions with denominator 2ᵏ, as tightly as it takes. Nothing
here is rounded to a float, and no limit on precision ends the search: it stops when the interval
of the one lies wholly on one side of the interval of the other.
"""

from __future__ import annotations

from collections.abc import Callable

_STEP = 64  # bits by which both intervals are sharpened; one step nearly always decides


def exp_enclosure(numerator: int, denominator: int, bits: int) -> tuple[int, int]:
    """Whole numbers low ≤ 2ᵇⁱᵗˢ·exp(−numerator/denominator) ≤ high, at most a few apart.

    x = numerator/denominator is halved until it is below 1, where the series Σ (−x)ʲ/j! alternates
    with falling terms, so that what is left out is smaller than the last term; each term is kept as
    an interval. Squaring undoes the halving. Every step rounds outwards.

    >>> low, high = exp_enclosure(1, 1, 64)
    >>> low <= 0x5E2D58D8B3BCDF1A <= high, high - low <= 2  # 2⁶⁴/e = 0x5E2D58D8B3BCDF1A.BADE…
    (True, True)
    """
    halvings = (numerator // denominator).bit_length()
    divisor = denominator << halvings
    work = bits + 2 * halvings + 16  # guard bits; the result is an enclosure with any number
    low = high = term_low = term_high = 1 << work
    order = 0
    while term_high > 0:
        order += 1
        term_low = term_low * numerator // (divisor * order)
        term_high = -(-term_high * numerator // (divisor * order))
        if order % 2:
            low, high = low - term_high, high - term_low
        else:
            low, high = low + term_low, high + term_high
        if term_high == 1:  # the rest of the series is at most this term
            low, high = low - 1, high + 1
            break
    low = max(low, 0)
    for _ in range(halvings):
        low, high = low * low >> work, -(-high * high >> work)
    return low >> work - bits, -(-high >> work - bits)


def below(
    start: int,
    width: int,
    factor: int,
    numerator: int,
    denominator: int,
    random_bits: Callable[[int], int],
) -> bool:
    """Whether start + width·U < factor·exp(−numerator/denominator), for U uniform on [0, 1).

    `random_bits(k)` gives k fresh random bits as a whole number.

    >>> below(0, 1, 1, 1, 2, random_bits=lambda k: 0)  # U = 0.000…
    True
    >>> below(0, 1, 1, 1, 2, random_bits=lambda k: 2**k - 1)  # U = 0.111…
    False
    """
    uniform = known = 0
    while True:
        uniform = uniform << _STEP | random_bits(_STEP)
        known += _STEP
        low, high = exp_enclosure(numerator, denominator, known)
        left = (start << known) + width * uniform
        if left + width <= factor * low:
            return True
        if left >= factor * high:
            return False
