"""FAISS retrieval for search agents: build, search, serve. Needs neither mempo_ray nor Ray.

    corpus file ──corpus──▶ passages.arrow ──encoder──▶ vectors ──build──▶ index folder ◀──manifest── checks
                                                                              │
    queries (many callers) ──service: cache, single-flight, micro-batches──▶ index ──▶ passages

Importing the package costs nothing; each module imports what it needs (`encoder` loads torch, and `build` and
`index` load FAISS, only when they are used).
"""
