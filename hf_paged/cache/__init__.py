"""The pool's memory and the handles to it.

:mod:`~hf_paged.cache.storage` holds the tensors, :mod:`~hf_paged.cache.runtime` what one patched
model shares between all its calls, :mod:`~hf_paged.cache.step` one forward, and
:mod:`~hf_paged.cache.paged_cache` the transformers ``Cache`` that a user sees.
"""
