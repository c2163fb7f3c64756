"""`python scripts/inspect_prompt.py [key=value …]`: the same as `llmtrain inspect`, straight from a checkout.

Not inspect.py, which would stand before the standard library's while Python starts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In the place of scripts/ itself, whose tokenize.py would stand before the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from llmtrain.launch.main import main

    sys.exit(main("inspect"))
