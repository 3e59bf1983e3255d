"""Three ways to give memory to requests, simulated side by side: no model, no tensors.

One stream of requests, one budget of token slots, several allocators. ``static`` reserves the
longest length for everyone, ``contiguous`` gives each request one run that grows, and ``paged`` is
this project's own :class:`~hf_paged.core.block_pool.BlockPool` and
:class:`~hf_paged.core.block_table.BlockTable`; the ones with prefixes and forks are its own
:class:`~hf_paged.core.cache_manager.KVCacheManager`.
"""
