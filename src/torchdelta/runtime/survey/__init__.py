"""Finds the least budget for a step that does not fit."""
