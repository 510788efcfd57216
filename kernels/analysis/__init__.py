"""Reads what the TPU compiler prints of a kernel, and predicts from it how fast the kernel can be.

    folder of dumps --dump--> files of one kernel
        --bundles--> instructions --loops--> loop nest, optional bodies
        --occupancy, tables--> cycles, units, slots --schedule--> one record per loop
        --prediction--> share of the HBM or matrix-unit roofline

Only parses: whoever launches the compiler, and with which flags, is somebody else (the command
line). Nothing is executed anywhere, so every figure is a static prediction.
"""
