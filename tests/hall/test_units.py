"""The formatter, at its borders."""

import math

import pytest

from windlass import units


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (units.MIB, "1.0 MiB"),
        (80 * units.GIB, "80.0 GiB"),
        (3 * 1024 * units.GIB, "3.0 TiB"),
        (5000 * 1024 * units.GIB, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_binary(num_bytes, text):
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_999, "1 M"),
        (1_543_714_304, "1.54 G"),
        (2.5e18, "2.5 E"),
    ],
)
def test_counts_are_decimal(count, text):
    assert units.format_count(count) == text


def test_one_is_singular():
    assert [units.counted(number, "document", ",") for number in (0, 1, 2, 1234)] == [
        "0 documents", "1 document", "2 documents", "1,234 documents",
    ]  # fmt: skip
    assert units.counted(2, "micro-batch") == "2 micro-batches"


def test_three_digits_end_in_zeros_too():
    assert [units.format_count(rate, is_fixed=True) for rate in (57, 14_000, 570_000, 1.5e6)] == [
        "57", "14.0 k", "570 k", "1.50 M",
    ]  # fmt: skip
    assert [units.three_digits(value) for value in (0.57, 0.05, 14.0, 123.4, float("inf"))] == [
        "0.570", "0.0500", "14.0", "123", "inf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.42, "0.42s"),
        (9.994, "9.99s"),
        (10, "10s"),
        (59.4, "59s"),
        (75, "1m15s"),
        (3599.6, "1h00m"),
        (3725, "1h02m"),
        (100 * 3600, "100h00m"),
        (math.inf, "n/a"),
        (math.nan, "n/a"),
    ],
)
def test_durations(seconds, text):
    assert units.format_duration(seconds) == text


def test_perplexity_is_none_where_it_overflows_or_the_loss_is_not_a_number():
    assert units.perplexity(2.0) == pytest.approx(math.exp(2.0))
    assert units.perplexity(701.0) is None and units.perplexity(math.inf) is None and units.perplexity(math.nan) is None


def test_bits_per_byte_is_one_where_each_byte_costs_ln_2_nats():
    assert units.bits_per_byte(math.log(2) * 300, 300) == pytest.approx(1.0)
    assert units.bits_per_byte(10.0, 0) is None
