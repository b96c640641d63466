"""A report on a target before it is downloaded: `check_target`, `eagle31 check`."""

from .check import TargetReport, check_target

__all__ = ["TargetReport", "check_target"]
