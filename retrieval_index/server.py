"""The HTTP form of a search service, in the shape that Search-R1's, verl's and ASearcher's clients speak.

    POST /retrieve  {"queries": ["…"], "topk": 3, "return_scores": true}
                    → {"result": [[{"document": {"id", "contents", "title", "text", "url"}, "score"}, …], …]}
                    without scores → {"result": [[{"id", "contents", …}, …], …]}
    POST /access    {"urls": ["passage:p12"]} → {"result": [{"contents": "…"} | null]}
    GET  /health    {"status": "ok", "passages": 15053, "index_id": "…"}
    GET  /stats     counters of the service

`contents` is the title line, a newline, the text. A query that cannot be searched (empty, over-long) finds nothing: an
empty list in its place. `topk` missing, null or 0 is the default.

Errors are `{"detail": "…"}` with a status that says who must act: 400, 413 and 422 the client; 503 with Retry-After the
queue is full or the service closed (verl's client tries a 503 again, but not a 429); 504 the deadline; 500 the search
failed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval_index import manifest as manifests
from retrieval_index.corpus import DocumentLike, Passage, PassageStore
from retrieval_index.errors import SearchTimeout, ServeError, ServiceClosed, ServiceError, ServiceOverloaded
from retrieval_index.manifest import PASSAGES_FILE
from retrieval_index.service import RejectedQuery, Result

DEFAULT_TOP_K = 3
MAX_TOP_K = 1_000
MAX_QUERIES = 4_096
MAX_BODY_BYTES = 64 * 2**20
"""Of a request: `MAX_QUERIES` of the longest that are searched, at four bytes a letter."""
TOO_LARGE = f"the body has more than {MAX_BODY_BYTES} bytes"
BACKLOG = 4_096
URL_PREFIX = "passage:"
"""`url` of a document: this and its id. What `/access` takes."""


class Searches(Protocol):
    """What is served: a `RetrievalService`, or a pool of replicas on Ray (`serving_pool.ReplicaPool`)."""

    async def warm_up(self) -> None:
        """Returns when searches are answered."""
        ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[Result]: ...

    async def counters(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class RetrieveRequest(BaseModel):
    """Body of `/retrieve`."""

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = None
    return_scores: bool = False


class AccessRequest(BaseModel):
    """Body of `/access`."""

    urls: Annotated[list[str], Field(max_length=MAX_QUERIES)]


def make_app(searches: Searches, index: str | Path, default_top_k: int = DEFAULT_TOP_K) -> FastAPI:
    """The application. It warms `searches` up before the first request, and closes them after the last.

    Args:
        index: the folder that is searched; its passages are read here for `/access`.
    """
    manifest = manifests.load(index)
    passages = PassageStore(Path(index) / PASSAGES_FILE)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        try:
            await searches.warm_up()
            yield
        finally:
            await searches.close()

    app = FastAPI(title="retrieval_index", lifespan=lifespan)
    app.add_middleware(_BodyLimit)
    app.add_exception_handler(ServiceError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveRequest) -> JSONResponse:
        found = await searches.search(body.queries, body.topk or default_top_k)
        return JSONResponse({"result": [_listed(result, body.return_scores) for result in found]})

    @app.post("/access")
    async def access(body: AccessRequest) -> JSONResponse:
        ids = [url.removeprefix(URL_PREFIX) for url in body.urls]
        found = await asyncio.to_thread(passages.find, ids)
        return JSONResponse({"result": [passage and {"contents": _contents(passage)} for passage in found]})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "passages": manifest.count, "index_id": manifest.index_id}

    @app.get("/stats")
    async def stats() -> dict[str, float]:
        return await searches.counters()

    return app


class _BodyLimit:
    """413 in place of reading a body that nobody can have meant; uvicorn itself reads any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            await JSONResponse({"detail": TOO_LARGE}, 413)(scope, receive, send)
            return
        num_read = 0

        async def receive_some() -> Message:  # a chunked body does not say its length
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > MAX_BODY_BYTES:
                raise HTTPException(413, TOO_LARGE)
            return message

        await self._app(scope, receive_some, send)


def serve(searches: Searches, index: Path, host: str, port: int, default_top_k: int = DEFAULT_TOP_K) -> None:
    """Serve until SIGINT or SIGTERM. Port 0 takes a free one; the address is printed as soon as it is taken.

    Requests that come before the encoder is warm wait.

    Raises:
        ServeError: the address cannot be used. And what `searches.warm_up` raises.
    """
    try:
        listener = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}", "port", "choose another") from error
    print(f"retrieval at http://{host}:{listener.getsockname()[1]}/retrieve", flush=True)
    config = uvicorn.Config(make_app(searches, index, default_top_k), log_level="warning")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_warm_up_and_serve(searches, uvicorn.Server(config), listener))


async def _warm_up_and_serve(searches: Searches, server: uvicorn.Server, listener: socket.socket) -> None:
    """Warm first: of what fails in the application's own start, uvicorn would make a traceback and exit code 3."""
    try:
        await searches.warm_up()
    except BaseException:
        await searches.close()
        raise
    await server.serve([listener])


def _listed(result: Result, with_scores: bool) -> list[dict[str, Any]]:
    if isinstance(result, RejectedQuery):
        return []
    if with_scores:
        return [{"document": _document(passage), "score": passage.score} for passage in result]
    return [_document(passage) for passage in result]


def _document(passage: Passage) -> dict[str, str]:
    return {
        "id": passage.id,
        "contents": _contents(passage),
        "title": passage.title,
        "text": passage.text,
        "url": URL_PREFIX + passage.id,
    }


def _contents(passage: DocumentLike) -> str:
    return f"{passage.title}\n{passage.text}"


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ServiceOverloaded | ServiceClosed):
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})
    return JSONResponse({"detail": str(error)}, 504 if isinstance(error, SearchTimeout) else 500)


async def _answer_wrong_body(_: Request, error: Exception) -> JSONResponse:
    """Without the input itself, which FastAPI would repeat: it may be large, or hold what JSON cannot (NaN)."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": "; ".join(f"{_place(e['loc'])}: {e['msg']}" for e in error.errors()[:10])}, 422)


def _place(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)
