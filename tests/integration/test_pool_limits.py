"""A pool is bounded: what does not fit is refused before anything is written, and says why."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.errors import (
    CacheStateError,
    ConfigurationError,
    InputMismatchError,
    KVCacheFullError,
)
from reference import CACHE_NAME, patched
from tiny_models import Batch, build, ragged_batch

pytestmark = pytest.mark.core_suite


def test_prompts_that_do_not_fit_are_refused_before_the_first_forward() -> None:
    model, batch = build("llama"), ragged_batch((16, 16, 16, 16))
    computed: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: computed.append(1))
    with patched(model, num_blocks=9):
        with pytest.raises(KVCacheFullError, match=r"step 0 of generate\(\)") as caught:
            model.generate(**batch.inputs, max_new_tokens=4)
        error = caught.value
        assert (error.num_needed_blocks, error.num_available_blocks) == (16, 9)
        assert (error.num_rows, error.num_rows_that_fit) == (4, 2)
        for remedy in ("kv_memory=", "num_blocks=", "fewer rows"):
            assert remedy in str(error)
        assert computed == []
        assert hf_paged.stats(model).used_blocks == 0
        assert copy.copy(error).num_rows == pickle.loads(pickle.dumps(error)).num_rows == 4


def test_chunked_prompts_are_checked_as_a_whole() -> None:
    model, batch = build("llama"), ragged_batch((16, 16, 16, 16))
    computed: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: computed.append(1))
    with patched(model, num_blocks=9):
        with pytest.raises(KVCacheFullError, match="the prompt of generate"):
            model.generate(**batch.inputs, max_new_tokens=4, prefill_chunk_size=4)
        assert computed == []


def test_a_later_step_that_does_not_fit_names_itself_and_frees_the_call() -> None:
    """The second row gives way, then the first one grows out of the pool alone."""
    model, batch = build("llama"), ragged_batch((8, 8))
    with patched(model, num_blocks=5):
        with pytest.raises(KVCacheFullError, match=r"step 13 of generate\(\): 1 more") as kept:
            model.generate(**batch.inputs, max_new_tokens=20, min_new_tokens=20)
        assert hf_paged.stats(model).used_blocks == 0
        expected = model.generate(**batch.row(0).inputs, max_new_tokens=12)
        assert expected.shape[1] > 8
        del kept


def test_every_pool_size_gives_the_same_tokens_or_an_error() -> None:
    model, batch = build("llama"), ragged_batch((9, 3, 6))
    options: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, num_beams=2)
    expected = model.generate(**batch.inputs, **options)
    outcomes = []
    for num_blocks in range(1, 30):
        with patched(model, num_blocks=num_blocks):
            try:
                got = model.generate(**batch.inputs, **options)
            except KVCacheFullError:
                outcomes.append(False)
            else:
                assert torch.equal(got, expected)
                outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]
    assert outcomes[-1]


def test_a_cache_that_lives_on_holds_its_blocks_until_it_is_collected() -> None:
    model, batch = build("llama"), ragged_batch((9,))
    with patched(model):
        out = model.generate(**batch.inputs, max_new_tokens=3, return_dict_in_generate=True)
        assert hf_paged.stats(model).used_blocks == 3
        del out
        gc.collect()
        assert hf_paged.stats(model).used_blocks == 0


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"kv_memory": 0}, "kv_memory=0"),
    ({"kv_memory": -1}, "kv_memory=-1"),
    ({"kv_memory": "2 bananas"}, "2 bananas"),
    ({"kv_memory": "4000TiB"}, "more than"),
    ({"kv_memory": 100}, "holds no block"),
    ({"kv_memory": "1MiB", "num_blocks": 4}, "both"),
    ({"num_blocks": 0}, "num_blocks"),
    ({"num_blocks": 10**12}, "more than"),
    ({"block_size": 0}, "block_size"),
    ({"block_size": 3}, "block_size"),
    ({"block_size": 15.5}, "block_size"),
    ({"backend": "abacus"}, "'auto', 'cpu', 'flash_attn_3'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_and_leave_the_model_alone(
    arguments: dict[str, Any], message: str
) -> None:
    model = build("llama")
    with pytest.raises(ConfigurationError, match=message):
        hf_paged.patch(model, **arguments)
    with pytest.raises(ConfigurationError, match="not patched"):
        hf_paged.stats(model)
    assert type(model.config).__module__.startswith("transformers.")


@pytest.mark.parametrize("kv_memory", ["2MiB", "2MB", 2_000_000, 0.0005])
def test_kv_memory_limits_the_pool(kv_memory: Any) -> None:
    model = build("llama")
    hf_paged.patch(model, kv_memory=kv_memory)
    stats = hf_paged.stats(model)
    assert stats.bytes_per_block == 2 * 2 * 8 * 4 * 16 * 4  # K, V, heads, D, fp32, tokens, layers
    if not isinstance(kv_memory, float):
        size = 2 << 20 if kv_memory == "2MiB" else 2_000_000
        assert size - stats.bytes_per_block < stats.capacity_bytes <= size
    hf_paged.unpatch(model)


def test_bad_uses_of_a_cache_leave_the_pool_as_it_was() -> None:
    model, other, batch = build("llama"), build("llama", seed=2), ragged_batch((9, 3))
    mask = torch.cat([batch.mask, torch.ones(2, 1, dtype=torch.long)], 1)
    step: dict[str, Any] = dict(input_ids=torch.tensor([[5], [7]]), attention_mask=mask)
    with patched(model, other), hf_paged.PagedCache(model) as cache:
        model(**batch.inputs, past_key_values=cache)
        before = hf_paged.stats(model)
        with pytest.raises(ConfigurationError, match="another model"):
            other(**step, past_key_values=cache)
        with pytest.raises(CacheStateError, match="crop"):
            cache.crop(-10)
        with pytest.raises(CacheStateError, match="out of range"):
            cache.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(CacheStateError, match="out of range"):
            cache.reorder_cache(torch.tensor([-1, 0]))
        with pytest.raises(ValueError, match="2 rows"):
            model(torch.tensor([[5]]), past_key_values=cache)
        released = cache.fork()
        released.release()
        with pytest.raises(CacheStateError, match="released"):
            model(**step, past_key_values=released)
        assert hf_paged.stats(model) == before
        model(**step, past_key_values=cache)


def test_a_cache_outlives_unpatch_as_an_error() -> None:
    model = hf_paged.patch(build("llama"), num_blocks=16)
    cache = hf_paged.PagedCache(model)
    model(ragged_batch((9,)).ids, past_key_values=cache)
    hf_paged.unpatch(model)
    with pytest.raises(CacheStateError, match="unpatched"):
        cache.fork()
    with pytest.raises(CacheStateError):
        model(torch.tensor([[5]]), past_key_values=cache)


# -- what sharing is worth: a Llama of 8 layers, 4 kv heads, D 64, fp32, block size 16 -----------


def _memory_model() -> torch.nn.Module:
    return build(
        "llama",
        num_hidden_layers=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
    )


def test_sixteen_samples_of_one_prompt() -> None:
    model, batch = _memory_model(), ragged_batch((511,))
    options: dict[str, Any] = dict(
        do_sample=True, num_return_sequences=16, max_new_tokens=32, min_new_tokens=32
    )
    torch.manual_seed(0)
    expected = model.generate(**batch.inputs, **options)
    stored = expected[:, :-1].tolist()  # nothing follows the last token
    distinct_full = {tuple(row[:end]) for row in stored for end in range(16, 542, 16)}
    with patched(model, block_size=16, debug=False):
        torch.manual_seed(0)
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        stats = hf_paged.stats(model)
    assert stats.bytes_per_block == 2 * 4 * 64 * 4 * 16 * 8
    ideal = (len(distinct_full) + 16) * stats.bytes_per_block
    assert ideal <= (31 + 16 * 3) * stats.bytes_per_block  # dense: 16 * 34 blocks, 136 MiB
    assert ideal <= stats.peak_used_bytes <= 1.05 * ideal


def test_eight_beams_of_one_prompt() -> None:
    model, batch = _memory_model(), ragged_batch((511,))
    options: dict[str, Any] = dict(num_beams=8, max_new_tokens=32, min_new_tokens=32)
    expected = model.generate(**batch.inputs, **options)
    with patched(model, block_size=16, debug=False):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        assert hf_paged.stats(model).peak_used_bytes < 15 << 20  # dense: 68 MiB


def test_ragged_prompts_waste_little() -> None:
    model, batch = _memory_model(), ragged_batch(tuple(16 + 31 * i for i in range(16)))
    options: dict[str, Any] = dict(max_new_tokens=64, min_new_tokens=64)
    expected = model.generate(**batch.inputs, **options)
    with patched(model, block_size=16, num_blocks=500, debug=False):
        assert torch.equal(model.generate(**batch.inputs, **options), expected)
        assert hf_paged.stats(model).utilization_at_peak >= 0.96


def test_equal_rows_come_back_in_full() -> None:
    """transformers#39525: never fewer rows than were given."""
    model, one = build("llama"), ragged_batch((9,))
    batch = Batch(one.ids.repeat(40, 1), one.mask.repeat(40, 1))
    expected = model.generate(**batch.inputs, max_new_tokens=4)
    with patched(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=4), expected)


def test_unpatch_waits_for_nobody_and_breaks_nobody() -> None:
    """A call that is running keeps its pool: unpatch is refused, the call goes on."""
    model, batch = build("llama"), ragged_batch((9,))
    expected = model.generate(**batch.inputs, max_new_tokens=6)
    refused = []

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        with pytest.raises(ConfigurationError, match=r"1 generate\(\) calls are running"):
            hf_paged.unpatch(model)
        refused.append(True)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with patched(model):
        got = model.generate(**batch.inputs, max_new_tokens=6, stopping_criteria=[criterion])
    assert torch.equal(got, expected)
    assert refused


def test_a_prompt_that_is_refused_leaves_a_users_new_cache_new() -> None:
    """Chunked prompts are checked as a whole first; that check opens no rows for good."""
    model, batch = build("llama"), ragged_batch((9, 9))
    with patched(model), hf_paged.PagedCache(model) as cache:
        with pytest.raises(InputMismatchError, match=r"\(2, 12\).*\(2, 9\)"):
            model.generate(
                batch.ids,
                attention_mask=torch.ones(2, 12, dtype=torch.long).index_fill_(
                    1, torch.tensor([0]), 0
                ),
                prefill_chunk_size=4,
                max_new_tokens=2,
                **{CACHE_NAME: cache},
            )
        assert cache.batch_size == -1
