"""What the plan says, held against the tensors of caches that really ran."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    Gemma3nTextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)

import hf_paged
from hf_paged.cli.app import main
from hf_paged.cli.kv_footprint import KVFootprint, LayerFootprint
from hf_paged.cli.plan_report import make_report, print_report
from hf_paged.cli.planned_model import PlannedModel
from tiny_models import CONFIGS, from_config

pytestmark = pytest.mark.core_suite

BY_HAND = ["--layers", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32"]
NUM_TOKENS = 21
"""More than the windows of the tiny models, and no multiple of a block."""

DEEPSEEK = DeepseekV3Config(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
GPT_OSS = GptOssConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
SHARED_KV = Gemma3nTextConfig(
    vocab_size=128,
    vocab_size_per_layer_input=128,
    hidden_size=32,
    hidden_size_per_layer_input=8,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_kv_shared_layers=2,
    laurel_rank=4,
    activation_sparsity_pattern=[0.0] * 4,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
ODD_CONFIGS: dict[str, Any] = {
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "gemma3n": SHARED_KV,
}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def fill(model: PreTrainedModel, cache: Any) -> None:
    """Store NUM_TOKENS: a prompt, then a step."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    tokens = torch.arange(3, 3 + NUM_TOKENS)[None]
    with torch.no_grad():
        model(tokens[:, :-1], use_cache=True, **{name: cache})
        model(tokens[:, -1:], use_cache=True, **{name: cache})


def allocated_bytes(cache: Any) -> int:
    """Return the bytes of the memory behind K and V, whatever part of it is in view."""
    tensors = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("family", [*CONFIGS, *ODD_CONFIGS])
def test_the_bytes_are_those_of_the_caches_of_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONFIGS, **ODD_CONFIGS}[family]
    model = from_config(config)
    dynamic, static = (
        DynamicCache(config=config),
        StaticCache(config=config, max_cache_len=NUM_TOKENS),
    )
    fill(model, dynamic)
    fill(model, static)
    lengths = f"1,{NUM_TOKENS}"
    report = planned(
        capsys, folder_of(config, tmp_path), "--lengths", lengths, "--dtype", "fp32", "--memory=1MB"
    )
    one, many = report["rows"]
    assert many["dynamic"]["bytes_per_sequence"] == allocated_bytes(dynamic)
    assert many["static"]["bytes_per_sequence"] == allocated_bytes(static)
    assert one["dynamic"]["bytes_per_sequence"] == report["bytes_per_token"]
    assert report["tokens_that_fit"] == 1_000_000 // report["bytes_per_token"]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_blocks_are_those_of_a_patched_model(
    family: str, block_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS[family]
    model = from_config(config)
    name = folder_of(config, tmp_path)
    flags = ["--memory", "256KiB", "--block-size", str(block_size), "--dtype", "float32"]
    flags += ["--prompt", "17", "--new", str(NUM_TOKENS - 16)]
    report = planned(capsys, name, *flags)
    (row,) = report["rows"]
    assert report["patchable"] is True
    assert row["lengths"] == [NUM_TOKENS]

    hf_paged.patch(model, kv_memory="256KiB", block_size=block_size)
    prompt = torch.arange(3, 20)[None]
    options = {"max_new_tokens": NUM_TOKENS - 16, "min_new_tokens": NUM_TOKENS - 16}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)
    stats = hf_paged.stats(model)
    hf_paged.unpatch(model)
    (blocks,) = [each for each in report["block_sizes"] if each["block_size"] == block_size]
    assert blocks["bytes_per_block"] == stats.bytes_per_block
    assert blocks["blocks"] == stats.num_blocks
    promised, taken = row["paged"]["bytes_per_sequence"], stats.peak_used_bytes
    # A window may lie in one block less than it does at its worst place.
    spare = 0 if not report["windows"] else stats.bytes_per_block * report["sliding_layers"]
    assert taken <= promised <= taken + spare


def test_what_a_ragged_batch_saves(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, *BY_HAND, "--lengths", "16,64,160", "--memory", "1024.5KiB")
    per_token = 4 * 2 * 2 * 8 * 4
    assert report["bytes_per_token"] == per_token
    assert report["max_length"] == 160
    pool = 1024 * 1024 // (16 * per_token) - 1
    counts = {cache: report["mixed"][cache]["sequences"] for cache in ("dynamic", "static")}
    assert counts == dict.fromkeys(("dynamic", "static"), 1024 * 1024 // (160 * per_token))
    rounds, left = divmod(pool, 1 + 4 + 10)
    assert report["mixed"]["paged"]["sequences"] == 3 * rounds + (left >= 1) + (left >= 5)
    assert report["mixed"]["paged"]["bytes_per_sequence"] == 80 * per_token
    assert [row["paged"]["sequences"] for row in report["rows"]] == [pool, pool // 4, pool // 10]


def test_larger_blocks_waste_more(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, *BY_HAND, "--lengths", "100", "--memory", "1MiB", "--block-size", "4")
    waste = {
        row["block_size"]: row["wasted_bytes_per_sequence"] // report["bytes_per_token"]
        for row in report["block_sizes"]
    }
    assert waste == {4: 0, 8: 4, 16: 12, 32: 28, 64: 28, 128: 28}
    shares = [row["ragged_wasted_share"] for row in report["block_sizes"]]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] < 1


def test_windows_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*BY_HAND, "--window", "32", "--lengths", "100", "--memory", "1MiB"]
    assert planned(capsys, *flags)["bytes_per_old_token"] == 0
    report = planned(capsys, *flags, "--sliding-layers", "3")
    slot = 2 * 2 * 8 * 4
    assert (report["bytes_per_token"], report["bytes_per_old_token"]) == (4 * slot, slot)
    (row,) = report["rows"]
    assert row["dynamic"]["bytes_per_sequence"] == (100 + 3 * 32) * slot
    assert row["paged"]["bytes_per_sequence"] == (7 + 3 * 3) * 16 * slot


def test_layers_that_share_and_models_that_are_refused_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = planned(capsys, folder_of(SHARED_KV, tmp_path / "a"), "--memory", "1MiB")
    assert (shared["layers"], shared["storing_layers"]) == (4, 2)
    assert any("2 of 4 layers store nothing" in note for note in shared["notes"])
    latent = planned(capsys, folder_of(DEEPSEEK, tmp_path / "b"), "--memory", "1MiB")
    for report in (shared, latent):
        assert report["patchable"] is False
        assert any("hf_paged.patch refuses this model" in note for note in report["notes"])


def test_layers_of_unequal_size_have_no_paged_figures(capsys: pytest.CaptureFixture[str]) -> None:
    footprint = KVFootprint((LayerFootprint(64, 8), LayerFootprint(128)), 2)
    report = make_report(PlannedModel("odd", torch.float32, footprint), 2**20, [10], 10, 16)
    assert report["block_sizes"] == []
    assert report["rows"][0]["paged"] is None
    assert report["rows"][0]["dynamic"]["bytes_per_sequence"] == 8 * 64 + 10 * 128
    print_report(report)
    assert "no paged figures" in capsys.readouterr().out


def test_the_config_decides_the_dtype_unless_a_flag_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama"].__class__(**CONFIGS["llama"].to_dict())
    config.dtype = torch.bfloat16
    name = folder_of(config, tmp_path)
    half = planned(capsys, name, "--memory", "1MiB")
    full = planned(capsys, name, "--memory", "1MiB", "--dtype", "fp32")
    assert (half["dtype"], full["dtype"]) == ("bfloat16", "float32")
    assert full["bytes_per_token"] == 2 * half["bytes_per_token"]
    config.dtype = None
    unknown = planned(capsys, folder_of(config, tmp_path), "--memory", "1MiB")
    assert any("float32 assumed" in note for note in unknown["notes"])
    assert any("allows 256 tokens" in note for note in unknown["notes"])


def test_the_tables_say_it_to_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder_of(CONFIGS["gemma3"], tmp_path), "--memory", "4GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "Gemma3ForCausalLM" in text
    assert "K and V in 4 of 4 layers (2 of them with a window of 8 tokens)" in text
    assert "fit into 4.00 GiB" in text
    for word in ("DynamicCache", "StaticCache", "paged", "2048", "all of these", "Block sizes"):
        assert word in text


def test_without_a_budget_it_is_half_of_what_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    default = planned(capsys, *BY_HAND)["memory_bytes"]
    quarter = planned(capsys, *BY_HAND, "--memory", "0.25")["memory_bytes"]
    assert 0 < quarter < default
