"""CRC32C (Castagnoli; RFC 3720), for manifests; the native library sums shards."""

from __future__ import annotations


def _step(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_step, range(256)))


def crc32c(data: bytes) -> int:
    """Returns the CRC of `data`.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
