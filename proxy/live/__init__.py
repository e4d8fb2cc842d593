"""The live page at `/-/`: who has the GPU, who waits, and how it was; and the one thing that a person can do about it.

    Leases, History ─► view: rows of texts, chart as rectangles ─► html: the page as it is, whole without JavaScript
                                                       └─► feed: the same rows as events ─► page.js puts them in

What is shown is decided once, in `view.py`, and is nothing but text and numbers: whatever clients send as a model's
name is escaped by the server and put into text nodes by the script. `actions.py` says who may cancel.
"""

from proxy.live.actions import Actions, Hosts
from proxy.live.routes import live_routes

__all__ = ["Actions", "Hosts", "live_routes"]
