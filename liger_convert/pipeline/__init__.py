"""The steps from a checkpoint to a report, and the run that combines them."""
