"""OpenRLHF's command lines, translated into envgym's."""
