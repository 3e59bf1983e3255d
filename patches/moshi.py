"""Moshi's config names a sliding window, its layers attend to all tokens."""

from hf_paged.integration.model_spec import ModelSpec

SPEC = ModelSpec(
    model_types=("moshi",),
    unsupported="its layers attend further back than the window that its config announces",
)
