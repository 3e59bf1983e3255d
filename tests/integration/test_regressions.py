"""Each of these once gave wrong tokens or the wrong error."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

import hf_paged
from hf_paged.errors import CacheStateError, ConfigurationError, UnsupportedModelError
from reference import CACHE_NAME, patched
from tiny_models import build, ragged_batch

pytestmark = pytest.mark.core_suite

PROMPT = torch.arange(20, 34)[None]


def generate(model, ids=PROMPT, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, **options)


def forcing(tokens):
    """A logits processor that makes position i get tokens[i]."""

    def force(ids, scores):
        forced = torch.full_like(scores, -1e9)
        forced[:, tokens[ids.shape[1]]] = 0
        return forced

    return [force]


def test_token_types_keep_prefixes_apart():
    model = build("gpt2")
    ids = PROMPT.repeat(2, 1)
    types = torch.tensor([[9], [20]]).repeat(1, ids.shape[1])
    expected = [generate(model, ids), generate(model, ids, token_type_ids=types)]
    with patched(model):
        assert torch.equal(generate(model, ids), expected[0])
        assert torch.equal(generate(model, ids, token_type_ids=types), expected[1])


def test_a_prompt_of_one_token_under_a_hook_is_not_kept():
    model = build("llama")
    expected = generate(model)
    tokens = [*PROMPT[0].tolist(), 7]
    with patched(model):
        handle = model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out + 0.5)
        generate(model, PROMPT[:, :1], max_new_tokens=13, logits_processor=forcing(tokens))
        handle.remove()
        assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen2"])
def test_a_gap_within_a_window_keeps_prefixes_apart(family):
    model = build(family)
    tokens = torch.arange(20, 44)
    ids, mask = torch.zeros(2, 28, dtype=torch.long), torch.zeros(2, 28, dtype=torch.long)
    ids[0, 4:], mask[0, 4:] = tokens, 1
    ids[1, :6], mask[1, :6] = tokens[:6], 1
    ids[1, 10:], mask[1, 10:] = tokens[6:], 1

    def logits():
        result = generate(
            model, ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True
        )
        return torch.stack(result.logits)

    expected = logits()
    with patched(model):
        assert torch.allclose(logits(), expected, atol=1e-4)


def test_tokens_computed_behind_a_mask_are_not_reused():
    model = build("llama")
    ids, mask = torch.arange(20, 40)[None], torch.ones(1, 20, dtype=torch.long)
    mask[:, 2:6] = 0
    positions = torch.arange(20)[None]
    expected = generate(model, ids)
    with patched(model):
        cache = hf_paged.PagedCache(model)
        generate(model, ids[:, :10], max_new_tokens=1, **{CACHE_NAME: cache})
        generate(model, ids, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache})
        cache.release()
        assert torch.equal(generate(model, ids), expected)


def double_forward_of_the_class(model):
    mlp_class = type(model.model.layers[0].mlp)
    own = mlp_class.forward
    mlp_class.forward = lambda self, x: 2 * own(self, x)
    return lambda: setattr(mlp_class, "forward", own)


def swap_class_of_the_same_name(model):
    for layer in model.model.layers:
        own = type(layer.mlp)
        namespace = {
            "forward": lambda self, x, own=own: 2 * own.forward(self, x),
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
        }
        layer.mlp.__class__ = type(own.__name__, (own,), namespace)
    return lambda: None


def swap_function(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.functional.relu
    return lambda: None


def write_tensor_attribute(model):
    for layer in model.model.layers:
        layer.self_attn.scaling.fill_(0.1)
    return lambda: None


@pytest.mark.parametrize(
    "change",
    [
        double_forward_of_the_class,
        swap_class_of_the_same_name,
        swap_function,
        write_tensor_attribute,
    ],
)
def test_changed_code_and_attributes_give_no_stale_hit(change):
    model = build("llama")
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = torch.nn.functional.silu
        layer.self_attn.scaling = torch.tensor(0.35)
    undo = lambda: None  # noqa: E731
    try:
        with patched(model):
            generate(model)
            undo = change(model)
            got = generate(model)
        assert torch.equal(got, generate(model))
    finally:
        undo()


def test_qwen2_moe_asks_for_a_window_that_no_layer_uses():
    config = Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    batch = ragged_batch((5, 9))
    expected = generate(model, batch.ids, attention_mask=batch.mask)
    with patched(model):
        assert torch.equal(generate(model, batch.ids, attention_mask=batch.mask), expected)


def test_a_hook_that_reads_the_cache_gets_a_clear_error():
    model = build("llama")
    seen = []

    def read(module, args, kwargs):
        try:
            copy.copy(kwargs[CACHE_NAME]).release()
        except CacheStateError as error:
            seen.append(error)
        kwargs[CACHE_NAME].to_dynamic_cache()

    with patched(model):
        handle = model.model.layers[1].register_forward_pre_hook(read, with_kwargs=True)
        with pytest.raises(CacheStateError, match="in a forward"):
            generate(model)
        handle.remove()
    assert seen


def test_a_scope_without_a_hash_is_refused_at_once():
    model = build("llama")
    with (
        patched(model),
        pytest.raises(ConfigurationError, match="hash"),
        hf_paged.prefix_scope(model, ["tenant"]),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "DeepseekV3",
            {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 8, "n_group": 1},
        ),
        ("Llama4Text", {"attention_chunk_size": 8, "num_local_experts": 2, "head_dim": 8}),
        # Sizes of heads that differ by layer: the config itself raises when asked for one.
        ("Gemma4Text", {"head_dim": 8, "hidden_size_per_layer_input": 0}),
    ],
)
def test_what_cannot_page_is_refused_when_patching(name, settings):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="seam"):
        hf_paged.patch(model, num_blocks=10)
