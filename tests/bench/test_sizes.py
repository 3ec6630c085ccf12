"""Sizes of memory: what is read, and what is refused."""

from __future__ import annotations

import pytest

from headwater.bench.sizes import parse_bytes
from headwater.errors import UsageError

READ = [
    ("512MB", 512_000_000),
    ("1GiB", 1 << 30),
    ("1.5GiB", 3 << 29),
    ("0.1kB", 100),  # exact: 0.1 is no binary fraction
    (" 2 TiB ", 2 << 40),
    ("512mb", 512_000_000),  # any case: nobody means millibits
    ("512mib", 512 << 20),
    ("7B", 7),
]


@pytest.mark.parametrize(("text", "size"), READ)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "512", "512M", "512 Mbit", "-1MB", "1e3MB", "1,000MB", "1MB2", "٣MB"])
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"is not a size of memory; write a number and one of B, kB, MB, .*TiB"
    ) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "bytes_"), [("0MB", "0"), ("0.5B", "0.5"), ("1.0001kB", "1000.1")])
def test_a_size_is_a_whole_number_of_bytes(text: str, bytes_: str) -> None:
    with pytest.raises(UsageError, match=f"is {bytes_} bytes"):
        parse_bytes(text)
