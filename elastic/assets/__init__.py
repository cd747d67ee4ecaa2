"""The small trained model that ships with Elastic (see its README.md)."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "stdlib-2.6m"
