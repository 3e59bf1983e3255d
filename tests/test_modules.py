"""What every module of the package owes: a docstring, names that exist, examples that run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import pytest

import hf_paged
import hf_paged.patches

pytestmark = pytest.mark.core_suite


def module_names() -> list[str]:
    found = pkgutil.walk_packages(hf_paged.__path__, "hf_paged.")
    # Where the package is installed in place, hf_paged.patches is not below hf_paged.__path__.
    mapped = pkgutil.walk_packages(hf_paged.patches.__path__, "hf_paged.patches.")
    names = {module.name for modules in (found, mapped) for module in modules}
    return sorted(names | {"hf_paged", "hf_paged.patches"})


def test_the_list_of_modules_is_whole() -> None:
    assert {"hf_paged.config", "hf_paged.core.block_pool", "hf_paged.patches.standard"} <= set(
        module_names()
    )


def load(name: str) -> Any:
    if name == "hf_paged.backends.triton_kernels":
        pytest.importorskip("triton")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", module_names())
def test_all_names_things_that_exist_once(name: str) -> None:
    module = load(name)
    assert module.__doc__
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [one for one in exported if not hasattr(module, one)] == []


@pytest.mark.parametrize("name", module_names())
def test_examples_in_docstrings_run(name: str) -> None:
    assert doctest.testmod(load(name)).failed == 0
