"""The seam into transformers: which modules are taken over, how, and how they are given back."""
