"""`python scripts/report.py [key=value …]`: the same as `llmtrain report`, straight from a checkout."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In the place of scripts/ itself, whose tokenize.py would stand before the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from llmtrain.launch.main import main

    sys.exit(main("report"))
