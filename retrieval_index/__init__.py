"""Passage retrieval for search agents: build, search, serve. Needs neither mempo_ray nor (but for `--ray`) Ray.

    corpus file ──corpus──▶ passages.arrow ──encoder, bm25, build──▶ index folder ◀──manifest, contents── checks
                                                                         │
    queries (many callers) ──service: cache, single-flight, batches──▶ retriever ──▶ passages

Importing the package costs nothing; each module imports what it needs (`encoder` loads torch, and `build` and
`index` load FAISS, only when they are used).
"""
