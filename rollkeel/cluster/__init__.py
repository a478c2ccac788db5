"""A run on a Ray cluster: ranks that train and engines that sample are actors, the loop runs in the process that started it.

The only place that imports Ray. docs/cluster.md is the page for people who start such runs.
"""

import os

from rollkeel.host import collect_later

ACTOR_LOG = "ROLLKEEL_ACTOR_LOG"
"""In the environment of an actor of a run: the file that its output goes to."""
if ACTOR_LOG in os.environ:  # this process is about to import the rest of us
    collect_later()
