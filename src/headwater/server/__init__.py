"""A local server that never runs out of context: HTTP in the words of OpenAI's API, and a page to watch it.

Needs the extra `server`; runs whole on the fake engine.
"""
