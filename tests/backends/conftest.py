"""What several tests of the native backend share."""

from __future__ import annotations

import os

import pytest

from hf_paged.backends import native


@pytest.fixture(params=native.supported_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have backends that are made from here on use each instruction set of this processor."""
    if request.param not in native.built_isas() and not os.environ.get("CI"):
        pytest.skip(f"not built here: {request.param}")
    monkeypatch.setenv(native.ISA_VARIABLE, request.param)
    return str(request.param)
