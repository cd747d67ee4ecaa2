"""The command: `elastic`, or `python -m elastic`."""

from __future__ import annotations

import sys

from elastic.cli.inputs.interrupts import leaving_on_interrupt

with leaving_on_interrupt():
    from elastic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
