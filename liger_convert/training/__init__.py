"""Training stages: align, distill, finetune."""

from liger_convert.training.stage import rows_of, run_stage
from liger_convert.training.student import lora_projections

__all__ = ["lora_projections", "rows_of", "run_stage"]
