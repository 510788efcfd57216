"""Compiles kernels for a TPU that isn't there and turns what the compiler prints into a report.

`cases` says what is compiled, `launch` starts one compiler process each (`compiling` is what runs
in it), `rows` makes figures of a schedule, `compare` finds regressions, `terminal` and `page` show
them. The reading itself is `kernels.analysis`.
"""
