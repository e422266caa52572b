"""What the shared sizes do not fit: fields by model type, nested ones as dictionaries."""

from __future__ import annotations

from typing import Any

SPECIAL: dict[str, dict[str, Any]] = {}
