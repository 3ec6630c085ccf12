"""An unbounded conversation: turns, template pieces, sampling, the session.

Runs whole on the fake engine; nothing heavy is imported.
"""

from headwater.chat.ledger import Turn
from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.session import Chat
from headwater.chat.stats import Stats

__all__ = ["Chat", "Sampler", "Sampling", "Stats", "Turn"]
