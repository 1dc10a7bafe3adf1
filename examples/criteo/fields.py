"""Parse millions of short text fields at once, without a Python loop over lines.

A field of at most eight characters is one 64-bit load, so decimal and hexadecimal numbers are decoded by a few integer
operations on whole arrays (the eight digits of a field side by side in one word).
"""

from __future__ import annotations

import numpy as np

MARGIN = 8
"""Bytes that a buffer must have behind its last field, because every field is read as a whole word."""

_U = np.uint64


def _repeat(byte: int) -> np.uint64:
    return _U(int.from_bytes(bytes([byte]) * 8, "little"))


_LOW_BITS, _LOW_NIBBLES, _ASCII_ZEROS = _repeat(0x01), _repeat(0x0F), _repeat(0x30)


def load_words(
    buffer: np.ndarray,  # [bytes + MARGIN] uint8
    starts: np.ndarray,  # [n] int64
    lengths: np.ndarray,  # [n] int64, 0 to 8
) -> np.ndarray:
    """Return each field's characters as one word, the last one in the top byte, zero bytes below the first."""
    words = np.ndarray((buffer.size - 7,), dtype="<u8", buffer=buffer, strides=(1,))[starts]
    # Shifting the word up drops what follows the field in the file. A shift by 64 is undefined, hence the split in two.
    half = ((8 - lengths) * 4).astype(np.uint64)
    return (words << half) << half


def _right_aligned_digits(buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """As `load_words`, with '0' characters before the field."""
    half = (lengths * 4).astype(np.uint64)
    return load_words(buffer, starts, lengths) | ((_ASCII_ZEROS >> half) >> half)


def parse_hex(buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values [n] uint64 of hexadecimal fields of at most 8 digits, and whether each is one [n] bool.

    An empty field counts as legal and has value 0. Of any other field the value is undefined.
    """
    fits = lengths <= 8
    text = _right_aligned_digits(buffer, starts, np.minimum(lengths, 8))
    is_letter = (text >> _U(6)) & _LOW_BITS
    nibbles = (text & _LOW_NIBBLES) + is_letter * _U(9)
    # Spell the decoded digits again: whatever was not a hexadecimal digit comes out differently.
    nibbles &= _LOW_NIBBLES
    above_nine = ((nibbles + _LOW_NIBBLES - _repeat(9)) >> _U(4)) & _LOW_BITS
    legal = (text | (is_letter << _U(5))) == nibbles + _ASCII_ZEROS + above_nine * _U(0x27)
    pairs = ((nibbles << _U(4)) | (nibbles >> _U(8))) & _U(0x00FF00FF00FF00FF)
    quads = ((pairs << _U(8)) | (pairs >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return ((quads << _U(16)) | (quads >> _U(32))) & _U(0xFFFFFFFF), legal & fits


def _parse_eight_digits(buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    digits = _right_aligned_digits(buffer, starts, lengths) ^ _ASCII_ZEROS
    # A byte above 9 overflows into its top half when 0x76 is added; one above 0x7f has a top half already.
    legal = ((digits + _repeat(0x76)) | digits) & _repeat(0x80) == 0
    pairs = (digits * _U(10) + (digits >> _U(8))) & _U(0x00FF00FF00FF00FF)
    quads = (pairs * _U(100) + (pairs >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return (quads * _U(10000) + (quads >> _U(32))) & _U(0xFFFFFFFF), legal


def parse_int(buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values [n] int64 of decimal fields (perhaps a '-', at most 16 digits), and whether each is one.

    An empty field counts as legal and has value 0.
    """
    negative = (lengths > 0) & (buffer[starts] == ord("-"))
    starts, lengths = starts + negative, lengths - negative
    fits = (lengths <= 16) & ~(negative & (lengths == 0))
    tail = np.clip(lengths, 0, 8)
    values, legal = _parse_eight_digits(buffer, starts + np.maximum(lengths, 0) - tail, tail)
    values = values.astype(np.int64)
    wide = np.flatnonzero((lengths > 8) & fits)
    if wide.size:
        high, high_legal = _parse_eight_digits(buffer, starts[wide], lengths[wide] - 8)
        values[wide] += high.astype(np.int64) * 100_000_000
        legal[wide] &= high_legal
    return np.where(negative, -values, values), legal & fits


def mix64(words: np.ndarray) -> np.ndarray:
    """Return a well-mixed, invertible hash [n] uint64 of words [n] uint64 (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):  # NumPy warns when a lone number wraps around, which is what is wanted here
        words = (words ^ (words >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> _U(27))) * _U(0x94D049BB133111EB)
        return words ^ (words >> _U(31))
