"""Examination of an environment: is it repeatable, isolated, rightly typed, fast enough, and not to be fooled?

    report = await check_environment("file.py", {"digits": 2})
    print(report.passed, *report.findings, sep="\\n")

The questions are in the modules `tasks`, `episodes`, `repeatability`, `latency`, `leak`, `scores` and `endings`. They
are answered in a process of their own, so that an environment that hangs or crashes is a finding.
"""

from .report import Finding, Report, Verdict
from .run import check_environment

__all__ = ["Finding", "Report", "Verdict", "check_environment"]
