"""Training stages: align, distill, finetune."""

from liger_convert.training.stage import lora_projections, rows_of, run_stage

__all__ = ["lora_projections", "rows_of", "run_stage"]
