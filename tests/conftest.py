"""What every test shares: no network, and property tests that choose the same examples in every run."""

import os

from hypothesis import settings
from jaxtyping import install_import_hook

# Shapes are checked where tensors live, and only here: a checked call costs fifty times a plain one.
# Left out: what can be made, policies and traces. There a parameter of the wrong type would never reach the refusal.
CACHE = ("cache.bank", "cache.ring", "cache.probe", "cache.ledger")
POLICIES = ("policies.base", "policies.signals", "policies.protection", "policies.pooled_history")
TRACES = ("traces.result", "traces.heavy", "traces.window_run")
install_import_hook([f"headwater.{room}" for room in CACHE + POLICIES + TRACES], "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")
