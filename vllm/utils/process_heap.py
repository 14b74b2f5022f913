"""The memory of a process that has started and now serves for long."""

import ctypes
import gc


def settle_heap() -> None:
    """Let the collector never look again at what is alive, and give back what is not.

    To be called when a process is ready: modules, weights and tables live as long as
    it, and one full look at them takes longer than many steps. What loading needed
    besides is small pieces, which glibc keeps for itself until it is told.
    """
    gc.collect()
    # Only glibc has it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    gc.freeze()
