"""Philox4x32-10 as in Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011)."""

from __future__ import annotations

MASK = 2**32 - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, in 32 bits

# (counter, key, output): the known answers published with the authors' Random123 library.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Ten rounds on four 32-bit words; the key moves on by the Weyl constants before every round but the first."""
    for _ in range(10):
        product0 = MULTIPLIERS[0] * counter[0]
        product1 = MULTIPLIERS[1] * counter[2]
        counter = (
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 & MASK,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 & MASK,
        )
        key = ((key[0] + WEYL[0]) & MASK, (key[1] + WEYL[1]) & MASK)
    return counter
