"""A paged KV cache for Hugging Face causal LMs, inside your own process.

    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(...))

From there on ``generate()`` keeps its KV cache in one bounded pool of blocks: nothing is stored
for padding, equal prefixes are stored once, beams copy tables instead of tensors. The tokens are
those of the unpatched model.
"""

from hf_paged import errors
from hf_paged.backends.registry import available_backends
from hf_paged.cache.paged_cache import PagedCache
from hf_paged.cache.pool_view import PoolView
from hf_paged.cache.stats import KVCacheStats
from hf_paged.generation.batch import generate_batch
from hf_paged.generation.request_output import RequestOutput
from hf_paged.generation.row_wise import row_wise
from hf_paged.integration.patching import patch, unpatch
from hf_paged.integration.pool import (
    clear_prefix_cache,
    plot_pool,
    prefix_scope,
    reset_stats,
    stats,
    trim,
)

__version__ = "0.1.0"

__all__ = [
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
]
