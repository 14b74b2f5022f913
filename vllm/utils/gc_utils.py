"""The garbage collector of a process that serves for long."""

import gc


def freeze_gc_heap() -> None:
    """Let the collector never look again at what is alive now.

    To be called when a process is ready: modules, weights and tables live as long as
    it, and one full look at them takes longer than many steps.
    """
    gc.collect()
    gc.freeze()
