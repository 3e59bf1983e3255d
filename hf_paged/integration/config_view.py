"""A config that answers with the paged attention while, and only while, a paged forward runs.

The user's config object is never touched: other models may share it. The modules that choose the
attention get a view instead, an object of a subclass with the very same ``__dict__``. It reads
and writes like the original, pickles and deep-copies as the original, and differs in one
property.
"""

from __future__ import annotations

import types
from typing import Any

from transformers import PreTrainedConfig

from hf_paged.cache.runtime import PagedRuntime
from hf_paged.cache.step import CURRENT_STEP
from hf_paged.integration.attention import PAGED_ATTENTION

__all__ = ["config_view"]


def config_view(config: PreTrainedConfig, runtime: PagedRuntime) -> PreTrainedConfig:
    """Return a view of ``config`` for the modules of one patched model.

    Args:
        config: the user's object, shared and unchanged.
        runtime: of the patched model; forwards of other models see what the user set.
    """
    cls = type(config)
    user_set: Any = PreTrainedConfig.__dict__["_attn_implementation"]

    def get_attn_implementation(self: PreTrainedConfig) -> Any:
        step = CURRENT_STEP.get()
        if step is not None and step.is_paged and step.cache.runtime is runtime:
            return PAGED_ATTENTION
        return user_set.fget(self)

    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_attn_implementation": property(get_attn_implementation, user_set.fset),
        "_hf_paged_original_config": config,
        "__reduce_ex__": lambda self, protocol: (_unchanged, (config,)),
    }
    view_class: Any = types.new_class(
        cls.__name__, (cls,), exec_body=lambda ns: ns.update(namespace)
    )
    view: PreTrainedConfig = object.__new__(view_class)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def _unchanged(config: PreTrainedConfig) -> PreTrainedConfig:
    return config
