"""The regular families: their seams are found by looking, and the test suite proves each one."""

from hf_paged.integration.model_spec import ModelSpec

SPEC = ModelSpec(
    model_types=(
        "gemma2",
        "gemma3_text",
        "gpt2",
        "llama",
        "mistral",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
    ),
    packed=True,
)
