"""The fleet: it has no model. It keeps requests, gives them to instances, moves them, and repairs what is lost.

Way in: `Fleet`. The server, the command and users import it; it imports launchers and ranks' clients.
"""

from __future__ import annotations
