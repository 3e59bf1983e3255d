"""What hf_paged knows about architectures, one file for what one sentence explains.

Installed as ``hf_paged.patches``. Each module has one
:class:`~hf_paged.integration.model_spec.ModelSpec`, ``SPEC``.
"""

if __name__ != "hf_paged.patches":
    raise ImportError(
        f"this package is part of hf_paged and was imported as {__name__!r}: import "
        "hf_paged.patches instead."
    )
