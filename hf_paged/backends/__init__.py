"""Attention over blocks: tensors only, no accounting.

:mod:`~hf_paged.backends.base` is the contract, one file a backend, and
:mod:`~hf_paged.backends.torch_reference` the oracle that every other one is tested against.
"""
