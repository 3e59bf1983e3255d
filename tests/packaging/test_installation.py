"""What a user of the installed package can rely on."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import hf_paged
from hf_paged.errors import ConfigurationError, UnsupportedModelError
from hf_paged.integration import model_spec
from hf_paged.integration.model_spec import ModelSpec
from tiny_models import build

pytestmark = pytest.mark.core_suite


def test_public_names_exist_and_are_documented() -> None:
    assert set(hf_paged.__all__) == {
        "KVCacheStats",
        "PagedCache",
        "PoolView",
        "RequestOutput",
        "__version__",
        "available_backends",
        "clear_prefix_cache",
        "errors",
        "generate_batch",
        "patch",
        "plot_pool",
        "prefix_scope",
        "reset_stats",
        "row_wise",
        "stats",
        "trim",
        "unpatch",
    }
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name).__doc__, name


def test_core_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "import importlib.util, types;"
        "root = importlib.util.find_spec('hf_paged').submodule_search_locations;"
        "package = types.ModuleType('hf_paged'); package.__path__ = root;"
        "sys.modules['hf_paged'] = package;"
        "from hf_paged.core.cache_manager import KVCacheManager;"
        "from hf_paged.core.layer_group import group_layers;"
        "print(KVCacheManager(4, 4, group_layers([None])).pool.num_free)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"


def test_patches_refuse_to_load_under_another_name() -> None:
    assert "llama" in importlib.import_module("hf_paged.patches.standard").SPEC.model_types
    path = importlib.import_module("hf_paged.patches").__file__
    spec = importlib.util.spec_from_file_location("patches", path)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"hf_paged\.patches"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


REFUSAL = ModelSpec(model_types=("llama",), unsupported="it is needed elsewhere")
NO_SPEC = 3


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("REFUSAL", UnsupportedModelError, "it is needed elsewhere"),
        ("NO_SPEC", ConfigurationError, "expected a ModelSpec"),
    ],
)
def test_third_parties_add_specs_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, target: str, error: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "third_party", sys.modules[__name__])
    entry = EntryPoint("theirs", f"third_party:{target}", "hf_paged.patches")
    monkeypatch.setattr(
        model_spec, "entry_points", lambda group: [entry] if group == entry.group else []
    )
    model_spec._specs.cache_clear()
    try:
        with pytest.raises(error, match=message):
            hf_paged.patch(build("llama"), num_blocks=4)
    finally:
        model_spec._specs.cache_clear()


def test_the_library_logs_and_prints_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hf_paged")
    model = hf_paged.patch(build("llama"), num_blocks=4)
    hf_paged.unpatch(model)
    assert capfd.readouterr() == ("", "")
    assert "4 blocks of 16 tokens" in caplog.text
