"""What every test shares: no network, and property tests that choose the same examples in every run."""

import os

from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes are checked where tensors live, and only here: a checked call costs fifty times a plain one.
ROOMS = ("cache.bank", "cache.ring", "cache.probe", "cache.ledger", "policies.base", "policies.signals")
install_import_hook([f"headwater.{room}" for room in ROOMS], "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")
