"""Training stages: align, distill, finetune."""

from liger_convert.training.stage import rows_of, run_stage

__all__ = ["rows_of", "run_stage"]
