"""Hypothesis without its deadline: how long an example takes says something about the machine, not about a bound."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
