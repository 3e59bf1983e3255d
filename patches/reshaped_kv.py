"""DiffLlama swaps the halves of V, JetMoE repeats K and V, both after the cache has stored them."""

from hf_paged.integration.model_spec import ModelSpec

SPEC = ModelSpec(
    model_types=("diffllama", "jetmoe"),
    unsupported="its attention reshapes K and V after they are cached",
)
