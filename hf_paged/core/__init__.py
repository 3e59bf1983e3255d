"""Block accounting in pure Python: which block holds which tokens of which sequence.

Nothing here imports torch. A block id stands for ``block_size`` tokens of K and V of every layer
of one layer group; what a block id means in memory is the business of :mod:`hf_paged.cache`.
"""
