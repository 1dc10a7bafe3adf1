"""CRC32C (Castagnoli; RFC 3720) by NumPy, for manifests: they are read without TensorFlow, which our libraries need."""

from __future__ import annotations

import functools

import numpy as np

# Four bytes that bring a register of zeros to the one that a CRC begins with: all ones.
_BEGINNING = (0x641F6454).to_bytes(4, "little")


def crc32c(data: bytes) -> int:
    """Returns the CRC of `data`.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    return int(crc32c_each(np.frombuffer(data, np.uint8)[np.newaxis])[0])


def crc32c_each(rows: np.ndarray) -> np.ndarray:
    """Returns the CRC of each of `rows` [n, m] uint8: [n] uint32.

    Sums of neighbours are put together, then those of neighbouring pairs, and so on: sum(a + b) is sum(a), passed on
    over the length of b, and sum(b), in which passing on is linear.
    """
    # Zeros in front change nothing in a register of zeros.
    front = np.zeros([len(rows), -rows.shape[1] % 4 + len(_BEGINNING)], np.uint8)
    front[:, -len(_BEGINNING) :] = np.frombuffer(_BEGINNING, np.uint8)
    sums = np.concatenate([front, rows], 1).view("<u4")
    level = 0
    while sums.shape[1] > 1:
        if sums.shape[1] % 2:
            sums = np.concatenate([np.zeros_like(sums[:, :1]), sums], 1)
        sums = _passed(sums[:, 0::2], level) ^ sums[:, 1::2]
        level += 1
    return _passed(sums, 0)[:, 0] ^ np.uint32(0xFFFFFFFF)


def _passed(registers: np.ndarray, level: int) -> np.ndarray:
    """Registers of any shape after 4 * 2**level bytes of zeros."""
    passed = np.zeros_like(registers)
    for place, table in enumerate(_tables(level)):
        passed ^= table.take((registers >> (8 * place)) & 0xFF)
    return passed


@functools.cache
def _tables(level: int) -> np.ndarray:
    """What becomes of each value of each byte of a register: [4, 256]."""
    if level:
        half = _tables(level - 1)
        return _passed(half.ravel(), level - 1).reshape(4, 256)
    registers: np.ndarray = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, np.newaxis])
    for _ in range(32):
        registers = (registers >> 1) ^ np.where(registers & 1, np.uint32(0x82F63B78), np.uint32(0))
    return registers
