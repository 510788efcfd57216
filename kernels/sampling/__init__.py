"""Cut-offs of top-k and top-p sampling: one op, its reference and its backends."""

from kernels.sampling.cutoffs import BACKENDS, Backend, sampling_cutoffs

__all__ = ["BACKENDS", "Backend", "sampling_cutoffs"]
