"""`python -m server.cli` is `tpu-engine`."""

from server.cli import main

main()
