"""Checks of an environment: repeatability, isolation, types, speed, and rewards for trivial answers.

    report = await check_environment("file.py", {"digits": 2})
    print(report.passed, *report.findings, sep="\\n")

The checks are in the modules `tasks`, `episodes`, `repeatability`, `leak`, `scores` and `endings`. They run in a
separate process, so that an environment that hangs or crashes is a finding.
"""

from .report import CheckVerdict, Finding, Report
from .run import check_environment

__all__ = ["CheckVerdict", "Finding", "Report", "check_environment"]
