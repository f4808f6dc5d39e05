"""Verbs that only look: lines, show, inspect, doctor, cache."""

from __future__ import annotations
