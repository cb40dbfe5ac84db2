"""OpenRLHF's command lines, translated into envgym's."""

from .rlhf import entry_point, translate_file
from .table import PROGRAMS, help_of
from .translate import translate

__all__ = ["PROGRAMS", "entry_point", "help_of", "translate", "translate_file"]
