"""Verbs of a maintainer: checkout, export, new, lint."""

from __future__ import annotations
