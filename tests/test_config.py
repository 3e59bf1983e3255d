"""Every bad value has an error of its own that names the argument, the value and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from hf_paged.config import PagedConfig, parse_kv_memory
from hf_paged.errors import ConfigurationError

pytestmark = pytest.mark.core_suite

SIZES = "expected bytes above 0, a size such as '2GiB' or '512MB', or a fraction in (0, 1)"
BLOCKS = "pass e.g. num_blocks=1024, or kv_memory='2GiB'"
BLOCK_SIZE = "must be 'auto' or a power of two"
HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (dict(kv_memory=0), ["kv_memory=0 is out of range", SIZES]),
        (dict(kv_memory=-1), ["kv_memory=-1 is out of range", SIZES]),
        (dict(kv_memory=0.0), ["kv_memory=0.0 is out of range", SIZES]),
        (dict(kv_memory=-0.5), ["kv_memory=-0.5 is out of range", SIZES]),
        (dict(kv_memory=1.5), ["kv_memory=1.5 is out of range", SIZES]),
        (dict(kv_memory=float("nan")), ["kv_memory=nan is out of range", SIZES]),
        (dict(kv_memory=float("inf")), ["kv_memory=inf is out of range", SIZES]),
        (dict(kv_memory="0GiB"), ["kv_memory='0GiB' is out of range", SIZES]),
        (dict(kv_memory="0"), ["kv_memory='0' is out of range", SIZES]),
        (dict(kv_memory="0.5B"), ["kv_memory='0.5B' is out of range", SIZES]),
        (dict(kv_memory="-1GiB"), ["kv_memory='-1GiB' is no size", SIZES]),
        (dict(kv_memory="2 bananas"), ["kv_memory='2 bananas' is no size", SIZES]),
        (dict(kv_memory=""), ["kv_memory='' is no size", SIZES]),
        (dict(kv_memory="GiB"), ["kv_memory='GiB' is no size", SIZES]),
        (dict(kv_memory="1e3"), ["kv_memory='1e3' is no size", SIZES]),
        (dict(kv_memory="50%"), ["kv_memory='50%' is no size", SIZES]),
        (dict(kv_memory="2 Gi B"), ["kv_memory='2 Gi B' is no size", SIZES]),
        (dict(kv_memory="inf"), ["kv_memory='inf' is no size", SIZES]),
        (dict(kv_memory=f"{HUGE}GiB"), [f"kv_memory='{HUGE}GiB' is no size", SIZES]),
        (dict(kv_memory=True), ["kv_memory=True is of type bool", SIZES]),
        (dict(kv_memory=[1]), ["kv_memory=[1] is of type list", SIZES]),
        (dict(kv_memory=b"2GiB"), ["kv_memory=b'2GiB' is of type bytes", SIZES]),
        (dict(num_blocks=0), ["num_blocks must be an integer of at least 1, got 0", BLOCKS]),
        (dict(num_blocks=-1), ["at least 1, got -1", BLOCKS]),
        (dict(num_blocks=1.5), ["an integer of at least 1, got 1.5", BLOCKS]),
        (dict(num_blocks=8.0), ["an integer of at least 1, got 8.0", BLOCKS]),
        (dict(num_blocks=True), ["an integer of at least 1, got True", BLOCKS]),
        (dict(num_blocks="8"), ["an integer of at least 1, got '8'", BLOCKS]),
        (
            dict(kv_memory="2GiB", num_blocks=8),
            ["kv_memory='2GiB' and num_blocks=8 both limit the pool", "drop one"],
        ),
        (dict(block_size=0), [BLOCK_SIZE, "got 0", "block_size=16"]),
        (dict(block_size=3), [BLOCK_SIZE, "got 3", "block_size=16"]),
        (dict(block_size=-4), [BLOCK_SIZE, "got -4", "block_size=16"]),
        (dict(block_size=2**60 + 1), [BLOCK_SIZE, f"got {2**60 + 1}", "block_size=16"]),
        (dict(block_size=15.5), [BLOCK_SIZE, "got 15.5", "block_size=16"]),
        (dict(block_size=16.0), [BLOCK_SIZE, "got 16.0", "block_size=16"]),
        (dict(block_size="16"), [BLOCK_SIZE, "got '16'", "block_size=16"]),
        (dict(block_size=True), [BLOCK_SIZE, "got True", "block_size=16"]),
        (dict(block_size=None), [BLOCK_SIZE, "got None", "block_size=16"]),
        (dict(backend=None), ["backend must be a name or 'auto'", "got None of type NoneType"]),
        (dict(backend=5), ["backend must be a name", "got 5 of type int", "backend='auto'"]),
        (dict(debug="yes"), ["debug must be True or False, got 'yes'"]),
        (dict(debug=1), ["debug must be True or False, got 1"]),
        (dict(prefix_caching=None), ["prefix_caching must be True or False, got None"]),
        (dict(batch_invariant=1), ["batch_invariant must be True or False, got 1"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        PagedConfig(**arguments)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("kv_memory", "num_bytes"),
    [
        (1, 1),
        (1 << 30, 1 << 30),
        (2**62 + 1, 2**62 + 1),
        (4096.0, 4096),
        (0.5, 500_000),
        (0.25, 250_000),
        (1e-9, 0),
        ("1", 1),
        ("4096", 4096),
        ("7b", 7),
        ("2kB", 2_000),
        ("512MB", 512_000_000),
        ("3gb", 3_000_000_000),
        ("1.1TB", 1_100_000_000_000),
        ("2KiB", 2_048),
        ("512 MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("1TiB", 2**40),
        ("9007199254740993", 2**53 + 1),
        ("0.3KB", 300),
        ("1.9B", 1),
    ],
)
def test_a_good_size_is_exact(kv_memory: Any, num_bytes: int) -> None:
    parsed = parse_kv_memory(kv_memory, num_free_bytes=1_000_000)
    assert parsed == num_bytes
    assert type(parsed) is int
    assert PagedConfig(kv_memory=kv_memory).kv_memory == kv_memory


@pytest.mark.parametrize("num_free_bytes", [0, 1, 10**12])
def test_only_a_fraction_depends_on_the_free_memory(num_free_bytes: int) -> None:
    assert parse_kv_memory("2GiB", num_free_bytes=num_free_bytes) == 2**31
    assert parse_kv_memory(2**31, num_free_bytes=num_free_bytes) == 2**31
    assert parse_kv_memory(0.5, num_free_bytes=num_free_bytes) == num_free_bytes // 2


@given(st.text() | st.from_regex(r"\s*[\d.\-]*\s*[a-zA-Z]*\s*", fullmatch=True))
@example("٣GiB")  # a digit, though not of ASCII
@example("²GiB")
@example(HUGE)
@example(f"0.{HUGE}GiB")
@example("1.GiB")
def test_any_text_is_a_size_or_a_configuration_error(text: str) -> None:
    try:
        num_bytes = parse_kv_memory(text, num_free_bytes=1000)
    except ConfigurationError:
        return
    assert type(num_bytes) is int
    assert num_bytes >= 1


@given(st.integers(1, 10**15), st.sampled_from(["", "B", "KB", "MB", "KiB", "GiB"]))
def test_whole_numbers_are_exact_in_every_unit(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KB": 1000, "MB": 10**6, "KiB": 2**10, "GiB": 2**30}[unit]
    assert parse_kv_memory(f"{number}{unit}", num_free_bytes=0) == number * factor


@given(st.floats() | st.integers())
def test_any_number_is_a_size_or_a_configuration_error(number: float) -> None:
    try:
        num_bytes = parse_kv_memory(number, num_free_bytes=1000)
    except ConfigurationError:
        return
    assert type(num_bytes) is int
    assert num_bytes == (int(1000 * number) if 0 < number < 1 else number)


@pytest.mark.parametrize("block_size", ["auto", 1, 2, 4, 16, 256])
def test_good_block_sizes(block_size: Any) -> None:
    assert PagedConfig(block_size=block_size).block_size == block_size


def test_defaults_are_those_of_patch() -> None:
    config = PagedConfig()
    assert dataclasses.asdict(config) == dict(
        kv_memory=None,
        num_blocks=None,
        block_size="auto",
        backend="auto",
        prefix_caching=True,
        batch_invariant=False,
        max_batch_tokens=None,
        swap_memory=None,
        compile=False,
        cuda_graphs="auto",
        packed_hooks=False,
        verify="auto",
        debug=False,
    )


def test_a_config_is_frozen_and_equal_by_value() -> None:
    config = PagedConfig(kv_memory="2GiB", block_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]
    assert config == PagedConfig(kv_memory="2GiB", block_size=4)
    assert config != PagedConfig(kv_memory="2GiB", block_size=8)
    assert len({config, PagedConfig(kv_memory="2GiB", block_size=4)}) == 1
