"""Tries the built wheel on every supported combination of Python and torch that can be had here.

Each combination gets a fresh virtual environment, the CPU build of torch, and the wheel from `dist/`; then a small
training runs plain and inside a budget, and every loss and parameter is compared bit for bit. The results are a table
in `docs/reference/compatibility.md`.
"""
