"""`HfDeepSpeedConfig` for scripts that import it from transformers, whose class asks for the package deepspeed.

It is Accelerate's, which tells what the file says (`get_value`, `is_zero3`, `is_offload`). `from_pretrained` does not
read it: see docs/deepspeed.md for a model that no rank holds as a whole.
"""

from accelerate.utils.deepspeed import HfDeepSpeedConfig

__all__ = ["HfDeepSpeedConfig"]
