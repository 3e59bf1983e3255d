"""Settings of the whole suite."""

from __future__ import annotations

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny models: threads cost more than they save
