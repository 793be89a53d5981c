"""Runs a command: the file of launch/ that Python was started with, or `python -m memsearcher_jax.launch COMMAND`.

A command imports this module before all others, so that Ctrl-C ends it in one line also during its imports.
"""

import sys

from memsearcher_jax.launch import main

sys.exit(main.main())
