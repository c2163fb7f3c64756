"""`python -m llmtrain <command> …`, the same as the console command `llmtrain`."""

import sys

from llmtrain.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
