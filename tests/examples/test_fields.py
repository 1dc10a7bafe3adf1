"""The vectorised parsers agree with int()."""

import numpy as np
import pytest
from criteo import fields


def located(texts: list[str]):
    joined = "".join(text + "|" for text in texts).encode("latin-1") + bytes(fields.MARGIN)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    starts = np.cumsum(lengths + 1) - lengths - 1
    return np.frombuffer(joined, np.uint8), starts, lengths


def test_hex_fields_of_every_length_read_as_int_does():
    rng = np.random.default_rng(0)
    texts = [f"{value:x}" for value in rng.integers(0, 2**32, 500)] + [f"{value:X}" for value in range(300)]
    texts += ["0", "f", "00000000", "ffffffff", "FFFFFFFF", "aBcDeF09", "7fffffff"]
    values, legal = fields.parse_hex(*located(texts))
    assert legal.all()
    assert values.tolist() == [int(text, 16) for text in texts]


@pytest.mark.parametrize("text", ["g", "-1", " 1", "0x1", "1 ", "@", "`", "G", ":", "/", "\x10", "\x81", "123456789"])
def test_what_is_not_hex_is_called_illegal(text):
    assert not fields.parse_hex(*located(["0", text, "1"]))[1].tolist()[1]


def test_decimal_fields_read_as_int_does():
    rng = np.random.default_rng(1)
    texts = [str(value) for magnitude in range(1, 16) for value in rng.integers(-(10**magnitude), 10**magnitude, 60)]
    texts += ["0", "-0", "007", "99999999", "100000000", "-99999999", "-100000000", "9999999999999999"]
    values, legal = fields.parse_int(*located(texts))
    assert legal.all()
    assert values.tolist() == [int(text) for text in texts]


@pytest.mark.parametrize(
    "text", ["-", "--1", "1-", "1.5", "a", " 1", "+1", "\x10", "\xb1", "1:2", "1" * 17, "12345678a0"]
)
def test_what_is_not_decimal_is_called_illegal(text):
    assert fields.parse_int(*located(["5", text, "6"]))[1].tolist() == [True, False, True]


def test_empty_fields_are_legal_zeros():
    for parse in (fields.parse_hex, fields.parse_int):
        values, legal = parse(*located(["", "1", ""]))
        assert values.tolist() == [0, 1, 0]
        assert legal.all()


def test_mix64_is_injective_on_a_range():
    assert np.unique(fields.mix64(np.arange(100_000, dtype=np.uint64))).size == 100_000
