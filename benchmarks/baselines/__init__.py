"""What the placement of models by intents is compared with: static degrees, and AlpaServe with its trace known.

Way in: `planners`, behind one protocol; `alpaserve.alpaserve`; `queueing`, what a placement leads to. `placement.py`
imports it.
"""
