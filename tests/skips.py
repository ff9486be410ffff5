"""Tests that need what a machine may not have: skipped there, unless nothing may be."""

import os

import pytest


def skip_for(why):
    """Skips the test if there is a reason, a line; where nothing may be skipped, it fails."""
    if why and os.environ.get("TESTS_MAY_SKIP") == "no":
        pytest.fail(why)
    if why:
        pytest.skip(why)
