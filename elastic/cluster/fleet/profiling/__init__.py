"""What the engine does around links, measured by passes of real ranks: `handovers.measure_handovers`; `guest` is the
process that measures it beside what is served."""
