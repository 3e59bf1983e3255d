"""MiMo-V2-Flash: the heads of its sliding layers differ from those of the full ones."""

from hf_paged.integration.model_spec import ModelSpec

SPEC = ModelSpec(
    model_types=("mimo_v2_flash",),
    unsupported="its layers store K and V of different sizes",
)
