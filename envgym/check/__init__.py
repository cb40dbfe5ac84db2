"""Whether an environment can be trusted: repeatable, isolated, rightly typed, fast enough, and not to be fooled.

    report = await check_environment("file.py", {"digits": 2})
    print(report.passed, *report.findings, sep="\\n")

What is looked at is in the modules `description`, `episodes`, `repeatability`, `isolation`, `latency`, `leak`, `scores`
and `endings`. They run in a process of their own (`host`), so that an environment that hangs or crashes is a finding.
"""

from .report import Finding, Report, Verdict
from .run import check_environment

__all__ = ["Finding", "Report", "Verdict", "check_environment"]
