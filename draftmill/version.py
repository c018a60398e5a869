"""The version, and the folder that holds the package: what every room may import."""

from pathlib import Path
from typing import Final

__version__ = "0.1.0"

ROOT: Final = Path(__file__).parents[1]
"""The checkout, or the environment's site-packages."""
