"""The command line: ``hf-paged`` and ``python -m hf_paged``, a command a file."""
