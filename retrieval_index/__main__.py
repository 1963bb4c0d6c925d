"""`python -m retrieval_index`: see `cli`."""

from retrieval_index.cli import main

main()
