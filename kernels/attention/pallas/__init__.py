"""The attention kernels for TPUs: a decode call and a chunk call over one paged cache."""
