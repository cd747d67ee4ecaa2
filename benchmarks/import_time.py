"""The cost of `import elastic` over `import torch`: processes in turn, wall time. Target: <= 15 %.

python benchmarks/import_time.py
"""

from __future__ import annotations

import subprocess
import sys

from common import arguments, finish, paired, ratio, show, table


def importing(module: str):  # type: ignore[no-untyped-def]
    return lambda: subprocess.run([sys.executable, "-P", "-c", f"import {module}"], check=True)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    times = paired({name: importing(name) for name in ("torch", "elastic")}, "cpu", options.rounds)
    result = ratio(times["elastic"], times["torch"])
    table(["import elastic / import torch"], [[show(result)]])
    finish("import_time", options.device, result)


if __name__ == "__main__":
    main()
