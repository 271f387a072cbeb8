"""Training stages: align, distill, finetune."""

from liger_convert.training.stage import run_stage

__all__ = ["run_stage"]
