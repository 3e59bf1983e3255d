"""The exception tree, and its drawing."""

from __future__ import annotations

import inspect
import re

import pytest

import hf_paged
from hf_paged import errors
from hf_paged.errors import HFPagedError, KVCacheFullError

pytestmark = pytest.mark.core_suite

BUILTIN_BASE = {
    "ConfigurationError": ValueError,
    "UnsupportedModelError": TypeError,
    "InputMismatchError": ValueError,
    "CacheStateError": RuntimeError,
    "KVCacheFullError": MemoryError,
    "PagedGradientError": RuntimeError,
}


def defined_classes() -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and cls.__module__ == errors.__name__
    }


def test_every_error_is_ours_and_what_a_caller_would_expect() -> None:
    assert defined_classes().keys() == BUILTIN_BASE.keys() | {"HFPagedError"}
    for name, builtin in BUILTIN_BASE.items():
        cls = getattr(errors, name)
        assert cls.__bases__ == (HFPagedError, builtin)
        assert cls.__doc__
    assert HFPagedError.__bases__ == (Exception,)


def test_the_drawing_shows_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+) +\((\w+)\)  +\S", errors.__doc__)
    assert dict(drawn) == {name: builtin.__name__ for name, builtin in BUILTIN_BASE.items()}
    assert errors.__doc__.count("──") == len(drawn)
    assert re.search(r"^    HFPagedError$", errors.__doc__, re.MULTILINE)


def test_all_errors_are_exported_in_order() -> None:
    assert errors.__all__ == sorted(defined_classes())
    assert hf_paged.errors is errors


def test_a_full_pool_carries_its_numbers() -> None:
    error = KVCacheFullError(
        "no room", num_needed_blocks=9, num_available_blocks=4, num_rows=3, num_rows_that_fit=1
    )
    assert str(error) == "no room"
    assert (error.num_needed_blocks, error.num_available_blocks) == (9, 4)
    assert (error.num_rows, error.num_rows_that_fit) == (3, 1)
