"""The learners that ship with envgym. Import them as `envgym.learners`."""

if __name__ != "envgym.learners":
    raise ImportError("write import envgym.learners: import learners makes a second, unregistered copy of every class")
